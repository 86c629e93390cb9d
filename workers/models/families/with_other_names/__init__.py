"""Families with the mathematics of Llama or GLM, whose configs and tensors have names of their own."""
