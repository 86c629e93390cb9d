"""Constraints on the response, such as JSON schemas."""
