"""Tensor, pipeline and expert parallelism: which part of a model a worker has, and how workers exchange results."""
