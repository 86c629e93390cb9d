"""Servers that commands use: running ones at a URL, and ones that a command starts for itself."""
