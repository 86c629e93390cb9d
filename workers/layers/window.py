"""The tokens to which a token attends."""

import msgspec


class Chunk(msgspec.Struct, frozen=True):
    """Attention within chunks of `size` tokens: a token attends to the tokens of its chunk up to itself."""

    size: int
    sees_previous: bool = False
    """True if a token also attends to the chunk before its own."""

    @property
    def longest(self) -> int:
        """The largest number of tokens to which a token attends, itself included."""
        return self.num_chunks * self.size

    @property
    def num_chunks(self) -> int:
        """The number of chunks to which a token attends."""
        return 2 if self.sees_previous else 1


Window = int | Chunk
"""The number of tokens to which a token attends, itself included, or the chunk within which it attends."""


def first_visible(position: int, window: Window | None) -> int:
    """Return the first position to which a token at this position attends."""
    if window is None:
        return 0
    if isinstance(window, Chunk):
        return max((position // window.size + 1 - window.num_chunks) * window.size, 0)
    return max(position + 1 - window, 0)
