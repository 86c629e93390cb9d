"""The scheduler sides of the built-in KV connectors."""
