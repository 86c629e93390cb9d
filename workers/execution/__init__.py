"""Execution of steps on a worker."""
