"""The command line: `engine serve`, `engine status` and the other commands."""
