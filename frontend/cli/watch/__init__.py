"""The command `engine top`: a live view of a running server."""
