"""Translate Mistral's own ``params.json`` into the fields of a Hugging Face ``config.json``."""
