"""Sounds in requests: decoded, resampled, and turned into the features that a model reads."""
