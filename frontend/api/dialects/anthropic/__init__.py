"""Anthropic's Messages API: messages, their batches, and tools of MCP servers."""
