"""Reads the vision towers of checkpoints from their configs."""
