"""Compressed attention: a window of tokens, and entries that summarize earlier ones."""
