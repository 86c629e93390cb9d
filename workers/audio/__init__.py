"""Encoders of sounds, whose outputs take the place of tokens."""
