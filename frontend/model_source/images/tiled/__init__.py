"""Readers of the image processors of models that split images into tiles."""
