"""Chat completions that are stored for clients (`store: true`), and their routes."""
