"""The indexers of sparse attention, which choose single keys or blocks of keys."""
