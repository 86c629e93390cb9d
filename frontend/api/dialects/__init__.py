"""APIs of other vendors: each translates its requests to chat completions, and writes answers in its own format."""
