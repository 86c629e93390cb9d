"""Reports of a core: logs, KV-cache events, scheduler times and load updates."""
