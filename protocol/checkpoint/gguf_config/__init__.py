"""Translate GGUF metadata into Hugging Face configs, one file per kind of architecture."""
