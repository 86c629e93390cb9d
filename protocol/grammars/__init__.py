"""Translate structured outputs to grammars, and compile and use these in disposable processes."""
