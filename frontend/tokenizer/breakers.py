"""The tokens with which the texts are spelled that end repetitions; see `DryParams`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock
from typing import Final

import numpy as np

from .tokenizer import Tokenizer

_MOST_TEXTS: Final = 256
"""Number of texts whose tokens are kept."""


class Breakers:
    """Finds the tokens that contain a text, and the sequences of tokens that begin and end with parts of it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._found: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()

    def find(self, texts: Iterable[str]) -> bytes:
        """Return the number of tokens of each spelling of the texts, followed by these, int32.

        It looks at the whole vocabulary, so it takes some 10 ms for a text that was not found before.
        """
        return b"".join(map(self._find, texts))

    def _find(self, text: str) -> bytes:
        with self._lock:
            if text in self._found:
                self._found.move_to_end(text)
                return self._found[text]
        found = self._search(text)
        with self._lock:
            self._found[text] = found
            if len(self._found) > _MOST_TEXTS:
                self._found.popitem(last=False)
        return found

    def _search(self, text: str) -> bytes:
        data = text.encode()
        bytes_by_id = self._tokenizer.bytes_by_id(skip_special_tokens=False)
        # The rest of the text after each of its beginnings, with which a token may end.
        rests = {
            data[:count]: self._rest(data[count:])
            for count in range(1, len(data))
            if _is_whole(data[count:])
        }
        sequences: dict[tuple[int, ...], None] = {}
        for token_id in range(self._vocab_size):
            token = bytes_by_id[token_id]
            if data in token:
                sequences[(token_id,)] = None
                continue
            for beginning, rest in rests.items():
                if token.endswith(beginning):
                    sequences[(token_id, *rest)] = None
        flat = [x for sequence in sequences for x in (len(sequence), *sequence)]
        return np.array(flat, np.int32).tobytes()

    def _rest(self, data: bytes) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode_output(data.decode()))


def _is_whole(data: bytes) -> bool:
    """Return whether the bytes begin with a whole character."""
    return data[0] & 0xC0 != 0x80
