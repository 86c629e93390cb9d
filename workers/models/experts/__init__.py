"""Mixtures of experts, in torch."""
