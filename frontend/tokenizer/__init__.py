"""Tokenizers: convert text to token IDs and back, from a Hugging Face directory or a GGUF file."""

import os

from .absent import NO_TOKENIZER
from .config import TokenizerConfig
from .load import load_tokenizer, tokenizer_json_path
from .tokenizer import Tokenizer

# The tokenizers library reads this variable at each call. Its thread pool does not speed up single prompts.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

__all__ = [
    "NO_TOKENIZER",
    "Tokenizer",
    "TokenizerConfig",
    "load_tokenizer",
    "tokenizer_json_path",
]
