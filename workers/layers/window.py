"""The tokens to which a token attends."""

import msgspec


class Chunk(msgspec.Struct, frozen=True):
    """Attention within chunks of `size` tokens: a token attends to the tokens of its chunk up to itself."""

    size: int


Window = int | Chunk
"""The number of tokens to which a token attends, itself included, or the chunk within which it attends."""


def first_visible(position: int, window: Window | None) -> int:
    """Return the first position to which a token at this position attends."""
    if window is None:
        return 0
    if isinstance(window, Chunk):
        return position - position % window.size
    return max(position + 1 - window, 0)
