"""Encoders of encoder-decoder models: sounds and source texts."""
