"""Families with short convolutions in layers with attention."""
