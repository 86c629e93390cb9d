"""mmproj files, which contain the towers of GGUF models."""

from .checkpoint import MmprojCheckpoint

__all__ = ["MmprojCheckpoint"]
