"""The KV cache on disk: blocks in append-only files, found by their content keys."""
