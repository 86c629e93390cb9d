"""Receive and decode request bodies, with limits on their size, structure and memory."""
