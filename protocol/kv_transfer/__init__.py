"""Messages between the scheduler's and the workers' halves of the built-in KV connectors."""
