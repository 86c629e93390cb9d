"""Text to token ids and back, from a Hugging Face directory or from a GGUF file."""

import os

from .config import TokenizerConfig
from .load import load_tokenizer, tokenizer_json_path
from .tokenizer import Tokenizer

# Read at each call. One prompt gains nothing from a thread pool, and the server counts its threads.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

__all__ = ["Tokenizer", "TokenizerConfig", "load_tokenizer", "tokenizer_json_path"]
