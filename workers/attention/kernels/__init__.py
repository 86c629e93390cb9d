"""Triton kernels of paged attention. Importing them requires Triton; only `triton_paged` does."""
