"""Compute the times of words, from those of tokens or from cross-attention (Whisper's alignment heads).

Shapes: N tokens, M outputs of the encoder.
"""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from ....protocol.arrays import Float32Array, Int64Array
from ...tokenizer.tokenizer import Tokenizer
from .segments import Word

_WITHOUT_SPACES: Final = ("zh", "ja", "th", "lo", "my", "yue")
"""Languages that do not separate words by spaces. In these, each character counts as a word."""

_OPENING: Final = "\"'“¿([{-"
"""Punctuation marks that belong to the word after them."""
_CLOSING: Final = "\"'.。,，!！?？:：”)]}、"
"""Punctuation marks that belong to the word before them."""


def align_words(
    alignment_NM: Float32Array,
    token_ids: Sequence[int],
    tokenizer: Tokenizer,
    *,
    language: str,
    start: float,
    seconds_per_output: float,
) -> list[Word]:
    """Return the words of a window with their times.

    Args:
        alignment_NM: The attention weight of each token, and of the end token after them, for each encoder output.
        token_ids: The N - 1 tokens of the text.
        tokenizer: The model's tokenizer.
        language: The code of the language.
        start: The start of the window in seconds, which is added to all times.
        seconds_per_output: Seconds between two successive encoder outputs.
    """
    times_N = (start + _first_outputs(alignment_NM) * seconds_per_output).tolist()
    return words_at(token_ids, list(pairwise(times_N)), tokenizer, language)


def words_at(
    token_ids: Sequence[int],
    times: Sequence[Sequence[float]],
    tokenizer: Tokenizer,
    language: str = "",
) -> list[Word]:
    """Return the words that tokens form. `times` has the start and the end of each token in seconds."""
    words: list[Word] = []
    first = 0
    for text, num_tokens in _merge_marks(_split_words(token_ids, tokenizer, language)):
        last = first + num_tokens - 1
        if word := text.strip():
            words.append(Word(word, round(times[first][0], 2), round(times[last][1], 2)))
        first = last + 1
    return words


def _first_outputs(alignment_NM: Float32Array) -> Int64Array:
    """Return the first encoder output of each token on the best path through all tokens and outputs, int64 [N].

    The path is found by dynamic time warping. Each diagonal of the cost matrix depends only on the two before it, so
    one array operation computes a diagonal.
    """
    n, m = alignment_NM.shape
    # Row d has the costs of diagonal d: token i at output d - i.
    costs = np.full((n + m - 1, n), np.inf)
    tokens_N = np.arange(n)
    costs[tokens_N[:, None] + np.arange(m)[None, :], tokens_N[:, None]] = -alignment_NM
    moves = np.zeros((n + m - 1, n), np.int8)
    before = np.full(n + 1, np.inf)
    last = np.full(n + 1, np.inf)
    last[1] = costs[0, 0]
    for d in range(1, n + m - 1):
        # A path reaches token i at output j from one of three predecessors: both one less, the token one less, or the
        # output one less.
        choices = np.stack((before[:-1], last[:-1], last[1:]))
        move = choices.argmin(axis=0)
        total = np.full(n + 1, np.inf)
        total[1:] = costs[d] + choices[move, tokens_N]
        moves[d] = move
        before, last = last, total
    first_N = np.zeros(n, np.int64)
    i, j = n - 1, m - 1
    while i or j:
        first_N[i] = j
        move = int(moves[i + j, i])
        i, j = i - (move != 2), j - (move != 1)
    first_N[0] = 0
    return first_N


def _split_words(
    token_ids: Sequence[int], tokenizer: Tokenizer, language: str
) -> list[tuple[str, int]]:
    characters = _whole_characters(token_ids, tokenizer)
    if language in _WITHOUT_SPACES:
        return characters
    words: list[tuple[str, int]] = []
    for text, count in characters:
        is_mark = text.strip() in string.punctuation and text.strip() != ""
        if not words or text.startswith(" ") or is_mark:
            words.append((text, count))
        else:
            before, num_before = words[-1]
            words[-1] = before + text, num_before + count
    return words


def _whole_characters(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[tuple[str, int]]:
    """Return texts with their numbers of tokens: one each, or more if a character consists of several."""
    found: list[tuple[str, int]] = []
    data, count = b"", 0
    for token in token_ids:
        data += tokenizer.token_bytes(token)
        count += 1
        try:
            found.append((data.decode(), count))
        except UnicodeDecodeError:
            continue
        data, count = b"", 0
    if count:
        found.append((data.decode(errors="replace"), count))
    return found


def _merge_marks(words: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Join opening marks with the word after them, and closing marks with the word before them."""
    joined: list[tuple[str, int]] = []
    opening, num_opening = "", 0
    for text, count in words:
        bare = text.strip()
        if bare and text.startswith(" ") and bare in _OPENING:
            opening, num_opening = opening + text, num_opening + count
        elif joined and not opening and bare and not text.startswith(" ") and _is_closing(bare):
            before, num_before = joined[-1]
            joined[-1] = before + text, num_before + count
        else:
            joined.append((opening + text.lstrip() if opening else text, num_opening + count))
            opening, num_opening = "", 0
    if opening:
        joined.append((opening, num_opening))
    return joined


def _is_closing(text: str) -> bool:
    return all(
        character in _CLOSING or unicodedata.category(character).startswith("P")
        for character in text
    )
