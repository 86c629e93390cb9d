"""Tensor and pipeline parallelism."""
