"""Matrices that stay quantized in memory, and the formats in which checkpoints store them."""

from .matrix import ActivationScheme, QuantizedMatrix, merge_rows

__all__ = ["ActivationScheme", "QuantizedMatrix", "merge_rows"]
