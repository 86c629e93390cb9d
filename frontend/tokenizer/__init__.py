"""Tokenizers: convert text to token IDs and back, from a Hugging Face directory or a GGUF file.

Names are resolved when first used, because the process that resolves a model needs only some of them.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .absent import NO_TOKENIZER
    from .config import TokenizerConfig
    from .gguf_cache import tokenizer_json_path
    from .load import load_tokenizer
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

_MODULES = {
    "NO_TOKENIZER": ".absent",
    "Tokenizer": ".tokenizer",
    "TokenizerConfig": ".config",
    "load_tokenizer": ".load",
    "tokenizer_json_path": ".gguf_cache",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name], __name__), name)
    return value
