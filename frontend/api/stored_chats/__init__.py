"""Chat completions that clients store."""
