"""Encoders of encoder-decoder models: audio clips and source texts."""
