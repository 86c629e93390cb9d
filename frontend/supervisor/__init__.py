"""The supervisor: the parent process that starts, watches, restarts and stops every process of an engine."""
