"""Positions of tokens: tables of embeddings, and biases of attention scores by distance."""
