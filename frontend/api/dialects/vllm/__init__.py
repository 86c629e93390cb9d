"""vLLM's own routes: scores of items, and tokens from tokens."""
