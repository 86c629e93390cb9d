"""The worker processes, which execute the model. Only they import torch."""
