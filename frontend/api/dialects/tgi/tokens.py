"""Tokens of a text with their places, as Text Generation Inference shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ....tokenizer.tokenizer import Tokenizer
from ...logprobs import Json


def simple_tokens(tokenizer: Tokenizer, text: str, token_ids: Iterable[int]) -> Iterator[Json]:
    """Yield each token with its text and the places in bytes where this starts and stops in `text`.

    Tokens that are not a part of the text, such as those at its beginning, have no text.
    """
    data, place = text.encode(), 0
    for token_id in token_ids:
        shown = tokenizer.token_bytes(token_id)
        if not data.startswith(shown, place):
            # Some tokenizers put a space before the text.
            shown = shown.lstrip(b" ")
        start = place
        if shown and data.startswith(shown, place):
            place += len(shown)
        piece = data[start:place].decode(errors="replace")
        stop = place if piece else 0
        yield {"id": token_id, "text": piece, "start": start if piece else 0, "stop": stop}
