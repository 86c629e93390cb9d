"""The event log of a scheduler: record it, write it to a file, replay it, and explain what happened to a request."""
