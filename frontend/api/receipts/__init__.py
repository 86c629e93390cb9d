"""Receipts: what a request cost, and where its prompt first differs from a cached one."""
