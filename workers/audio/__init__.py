"""Encoders of sounds, whose outputs replace the embeddings of tokens."""
