"""The layouts of published drafting heads: the names of their tensors, and which hidden states they read."""
