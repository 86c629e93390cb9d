"""Helpers for objects that endpoints store for clients: records, pages and metadata."""
