"""Measure the resources of this machine that the engine's processes may use."""
