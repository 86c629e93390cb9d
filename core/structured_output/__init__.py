"""Grammars of constrained requests."""
