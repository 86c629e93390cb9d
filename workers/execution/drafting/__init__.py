"""Draft models and drafting heads (EAGLE, multi-token prediction)."""
