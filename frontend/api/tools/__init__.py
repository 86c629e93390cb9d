"""Tools of chat completions: definitions, `tool_choice`, and calls in the response."""
