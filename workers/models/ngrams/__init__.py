"""Embeddings of n-grams of tokens, and token ids in tensors of hidden states."""
