"""Batch generation without a server."""
