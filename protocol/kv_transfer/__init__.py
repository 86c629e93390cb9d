"""Messages between the scheduler side and the worker side of the built-in KV connectors."""
