"""Requests that arrive as messages of a WebSocket."""
