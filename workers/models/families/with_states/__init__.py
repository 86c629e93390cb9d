"""Families with recurrent layers that have tensors of their own."""
