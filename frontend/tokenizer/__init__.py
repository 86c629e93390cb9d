"""Tokenizers: convert text to token IDs and back, from a Hugging Face directory or a GGUF file."""

from __future__ import annotations

import os

# The tokenizers library reads this variable at each call. Its thread pool does not speed up single prompts.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
