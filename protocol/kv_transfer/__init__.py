"""Messages between the two halves of built-in KV connectors."""
