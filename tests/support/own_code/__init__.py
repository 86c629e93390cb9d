"""Tiny random models in the formats of their authors, which transformers has no code for."""
