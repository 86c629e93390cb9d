"""Tools of MCP servers, which the server calls for the model while it answers."""
