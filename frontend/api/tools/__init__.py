"""Tool definitions, `tool_choice` and tool calls of chat completions."""
