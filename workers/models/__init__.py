"""Decoders assembled from a `ModelSpec` that is read from the checkpoint's own config."""
