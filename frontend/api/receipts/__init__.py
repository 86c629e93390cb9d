"""Receipts: what a request cost, and where its prompt left what was cached."""
