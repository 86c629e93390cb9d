"""Streamed responses as server-sent events."""
