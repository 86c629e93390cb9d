"""Descriptions of the parts of a model as data, each by its own type."""
