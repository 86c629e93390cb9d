"""Layers of decoders, and the description of a model as data, whose parts are in `specs`."""
