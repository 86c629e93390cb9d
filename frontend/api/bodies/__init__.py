"""Receiving and decoding request bodies."""
