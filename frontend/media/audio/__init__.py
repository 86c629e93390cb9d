"""Audio in requests: decode and resample it, cut it into windows, and compute the features that a model reads."""
