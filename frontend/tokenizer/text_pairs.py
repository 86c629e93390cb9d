"""Join two texts into one input for models that compare texts (cross-encoders)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import tokenizers


class TextPair(msgspec.Struct, frozen=True):
    """The tokens of two texts. Tokens from index `second_segment` on have token type 1; 0 means that none has."""

    token_ids: list[int]
    second_segment: int


class PairJoiner:
    """Joins two texts with the special tokens that a tokenizer puts before, between and after them."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        encoding = backend.encode("a", "a")
        texts: list[int | None] = encoding.sequence_ids
        first_end = len(texts) - texts[::-1].index(0) if 0 in texts else 0
        second_end = len(texts) - texts[::-1].index(1) if 1 in texts else len(texts)
        first = texts.index(0) if 0 in texts else 0
        second = texts.index(1) if 1 in texts else first_end
        ids: list[int] = encoding.ids
        self._before = ids[:first]
        self._between = ids[first_end:second]
        self._after = ids[second_end:]
        self._num_first_type = encoding.type_ids[first_end:second].count(0)
        self._has_types = 1 in encoding.type_ids

    @property
    def num_special(self) -> int:
        """The number of special tokens."""
        return len(self._before) + len(self._between) + len(self._after)

    def join(
        self,
        first: Sequence[int],
        second: Sequence[int],
        max_tokens: int | None = None,
        *,
        has_special: bool = True,
    ) -> TextPair:
        """Return two texts as one input.

        If it is too long, first the longer text is cut at its end, then both equally. As in the library tokenizers, an
        odd token stays with the text that was longer, or with the second of equal ones.
        """
        if max_tokens is not None:
            room = max(max_tokens - self.num_special * has_special, 0)
            # Neither text is cut while the other is longer.
            half = (room + (len(first) > len(second))) // 2
            num_first = min(len(first), max(room - len(second), half))
            first, second = first[:num_first], second[: room - num_first]
        if not has_special:
            token_ids = [*first, *second]
            return TextPair(token_ids, len(first) * self._has_types)
        token_ids = [*self._before, *first, *self._between, *second, *self._after]
        second_segment = len(self._before) + len(first) + self._num_first_type
        return TextPair(token_ids, second_segment * self._has_types)
