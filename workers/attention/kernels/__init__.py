"""Triton kernels of paged attention. Importing them requires Triton, so only `triton_paged` imports them."""
