"""Durable requests, which continue after their client or their frontend is gone, and can be read again."""
