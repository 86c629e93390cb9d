"""Encoders of images, whose outputs replace the embeddings of tokens."""
