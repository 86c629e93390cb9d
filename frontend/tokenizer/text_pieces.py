"""Encode a long text in pieces, so that the memory of the tokenizers library does not grow with the text.

The library needs about 70 bytes for each character of a text that it encodes at once.

Two successive pieces overlap. Both are encoded, and joined where a word begins in both encodings. Tokenizers divide a
text into words from left to right, and words into tokens independently, so the tokens after such a place are those of
the whole text. The place is far from both ends of the overlap, because a cut changes the words next to it. If there is
no such place, as in a text of one word or with a tokenizer that has no words, the text is encoded as a whole.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import tokenizers

from ...protocol.errors import ParameterError

PIECE: Final = 1 << 18
"""Number of characters of a piece. Texts that are not longer are encoded as a whole."""

OVERLAP: Final = 1 << 12
"""Number of characters that a piece shares with the next one."""

_NUM_COMPARED: Final = 16
"""Number of tokens after a joint that must be equal in both encodings."""


class EncodedText(NamedTuple):
    """The token IDs of a text, including special tokens that the tokenizer added before and after it."""

    token_ids: Sequence[int]
    num_before: int
    num_after: int


def encode_text(
    backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool
) -> EncodedText:
    """Return the tokens of a text, which is encoded in pieces if it is long.

    Raises:
        ParameterError: The vocabulary lacks some of the text.
    """
    pieces = _encode_pieces(backend, text) if len(text) > PIECE else None
    added = _added_tokens(backend) if pieces is not None and add_special_tokens else ([], [])
    if pieces is None or added is None:
        with _named_errors():
            [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        mask: list[int] = encoding.special_tokens_mask
        if 0 not in mask:
            return EncodedText(encoding.ids, len(mask), 0)
        return EncodedText(encoding.ids, mask.index(0), mask[::-1].index(0))
    before, after = added
    return EncodedText(array("i", before) + pieces + array("i", after), len(before), len(after))


def _encode_pieces(backend: tokenizers.Tokenizer, text: str) -> array[int] | None:
    """Return the tokens of a text without special tokens; None if its pieces cannot be joined."""
    token_ids: array[int] = array("i")
    step = PIECE - OVERLAP
    piece, first = encode_with_offsets(backend, text[:PIECE], add_special_tokens=False), 0
    for start in range(step, len(text) - OVERLAP, step):
        following = encode_with_offsets(
            backend, text[start : start + PIECE], add_special_tokens=False
        )
        joint = _find_joint(piece, following, step)
        if joint is None:
            return None
        end, next_first = joint
        token_ids.extend(piece.ids[first:end])
        piece, first = following, next_first
    token_ids.extend(piece.ids[first:])
    return token_ids


def encode_with_offsets(
    backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool
) -> tokenizers.Encoding:
    """Return the tokens of a text, which is encoded as a whole.

    Raises:
        ParameterError: The vocabulary lacks some of the text.
    """
    # `encode_batch_fast` does not compute offsets.
    with _named_errors():
        [encoding] = backend.encode_batch([text], add_special_tokens=add_special_tokens)
    return encoding


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # The library has no class of its own. A vocabulary without an unknown token lacks some texts.
        raise ParameterError("prompt", f"cannot be tokenized: {error}") from None


def _find_joint(
    piece: tokenizers.Encoding, following: tokenizers.Encoding, offset: int
) -> tuple[int, int] | None:
    """Return the indices of the same token in two pieces, of which the second begins at `offset` of the first.

    The token begins a word. Return None if there is no such token in the middle of the overlap.
    """
    ids, following_ids = piece.ids, following.ids
    for char in range(OVERLAP // 4, OVERLAP * 3 // 4):
        here, there = piece.char_to_token(offset + char), following.char_to_token(char)
        if not here or not there:
            continue
        begins = (
            (piece.token_to_chars(here) or (None,))[0] == offset + char
            and (following.token_to_chars(there) or (None,))[0] == char
            and piece.token_to_word(here) != piece.token_to_word(here - 1)
            and following.token_to_word(there) != following.token_to_word(there - 1)
        )
        here_end, there_end = here + _NUM_COMPARED, there + _NUM_COMPARED
        if begins and ids[here:here_end] == following_ids[there:there_end]:
            return here, there
    return None


def _added_tokens(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """Return the special tokens before and after every text; None if they depend on the text."""
    [encoding] = backend.encode_batch(["a"], add_special_tokens=True)
    [bare] = backend.encode_batch(["a"], add_special_tokens=False)
    mask: list[int] = encoding.special_tokens_mask
    if 0 not in mask:
        return None
    begin, end = mask.index(0), len(mask) - mask[::-1].index(0)
    if encoding.ids[begin:end] != bare.ids:
        return None
    return encoding.ids[:begin], encoding.ids[end:]
