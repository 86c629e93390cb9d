"""Read the vision towers of checkpoints from their configs, one file per group of families."""
