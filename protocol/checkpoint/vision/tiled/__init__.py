"""Readers of the towers of models that split images into tiles."""
