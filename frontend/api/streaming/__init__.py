"""Streamed responses, as server-sent events or in a dialect's format."""
