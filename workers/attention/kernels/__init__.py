"""Triton kernels of paged attention. Importing them needs Triton; only `triton_paged` does."""
