"""Decoders that are assembled from a `ModelSpec`, which is read from the checkpoint's own config."""
