"""Triton kernels for layers, quantized products and sampling."""
