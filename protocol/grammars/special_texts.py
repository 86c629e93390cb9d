"""Special tokens whose text a grammar contains."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def contains_special_text(tokenizer: LLTokenizer, spec: str) -> bool:
    """Return whether the text of a special token occurs in a grammar's source, escaped or not.

    The library then forces the special token itself where the text must follow, and refuses it when it is sampled.
    """
    source = spec.replace("\\", "")
    return any(text in source for text in _special_texts(tokenizer))


@lru_cache(maxsize=1)
def _special_texts(tokenizer: LLTokenizer) -> tuple[str, ...]:
    tokens = filter(tokenizer.is_special_token, range(tokenizer.vocab_size))
    return tuple(filter(None, (tokenizer.decode_str([token]) for token in tokens)))
