"""Durable requests, which continue after their client disconnects or their frontend exits, and can be read again."""
