"""The worker processes, which execute the model. Torch is imported nowhere else."""
