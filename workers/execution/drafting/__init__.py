"""Draft models."""
