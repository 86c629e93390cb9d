"""Products with quantized matrices, in Triton."""
