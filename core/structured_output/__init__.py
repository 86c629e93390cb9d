"""Compile and run the grammars of constrained requests."""
