"""Structured output: constraints on the response, such as JSON schemas and grammars."""
