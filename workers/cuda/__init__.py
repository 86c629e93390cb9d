"""Triton kernels of layers, quantized products and sampling."""
