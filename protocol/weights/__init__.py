"""Weights that arrive while an engine serves."""
