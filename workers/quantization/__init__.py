"""Matrices that stay quantized, and how checkpoints store them."""

from .matrix import ActivationScheme, QuantizedMatrix, merge_rows

__all__ = ["ActivationScheme", "QuantizedMatrix", "merge_rows"]
