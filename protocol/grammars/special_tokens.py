"""Handle special tokens in the masks of grammars, where llguidance confuses them with their texts."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_TOKEN_BYTES: Final = 1024
"""Number of bytes at the beginning of a text in which its first token is searched."""


class SpecialTokens:
    """The special tokens of a tokenizer.

    llguidance tokenizes a forced text like a prompt, so the text of a special token becomes that token. It then allows
    only this token, but refuses it when it is sampled.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self.ids = frozenset(filter(tokenizer.is_special_token, range(tokenizer.vocab_size)))
        # Special tokens usually have consecutive ids, so these are few words of a mask.
        self._start = min(self.ids, default=0) // 8
        self._end = max(self.ids, default=-8) // 8 + 1
        self._bits = sum(1 << token_id - 8 * self._start for token_id in self.ids)

    def find_allowed(self, mask: memoryview) -> list[int]:
        """Return the special tokens that a mask allows."""
        bits = int.from_bytes(mask[self._start : self._end], "little") & self._bits
        allowed: list[int] = []
        while bits:
            lowest = bits & -bits
            allowed.append(8 * self._start + lowest.bit_length() - 1)
            bits ^= lowest
        return allowed

    def find_first_token(self, text: bytes) -> int | None:
        """Return the longest ordinary token that is a prefix of the text, or None."""
        token_ids = self._tokenizer.greedy_tokenize(text[:MAX_TOKEN_BYTES].decode(errors="ignore"))
        return token_ids[0] if token_ids else None


@lru_cache(maxsize=1)
def special_tokens_of(tokenizer: LLTokenizer) -> SpecialTokens:
    """Return the special tokens of a tokenizer. The first call takes a few milliseconds."""
    return SpecialTokens(tokenizer)
