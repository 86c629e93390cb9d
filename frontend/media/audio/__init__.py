"""Sounds in requests: decode and resample them, cut them into windows, and compute the features that a model reads."""
