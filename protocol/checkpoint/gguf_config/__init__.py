"""Translates GGUF metadata into Hugging Face configs."""
