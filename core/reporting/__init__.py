"""Reports of a core: log lines, KV-cache events, times per request, and load updates for frontends."""
