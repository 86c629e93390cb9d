"""The servers that commands such as `engine chat` use: one at a URL, or one that the command starts for itself."""
