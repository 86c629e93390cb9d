"""Offline use: the Python class `LLM`, and commands that need no server (`run-batch`, `embed`, `transcribe`)."""
