"""Kinds of attention beside the usual one, each with its own projections."""
