"""The tokens to which a token attends."""

from enum import IntEnum

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


class AfterPrompt(msgspec.Struct, frozen=True):
    """A window of output tokens: a token attends to its prompt, and to the last `size` tokens, itself included."""

    size: int


Window = int | Chunk | AfterPrompt
"""The number of tokens to which a token attends, itself included, or the chunk within which it attends."""


def first_visible(position: int, window: Window | None) -> int:
    """Return the first position to which a token at this position attends."""
    if window is None or isinstance(window, AfterPrompt):
        return 0
    if isinstance(window, Chunk):
        return max((position // window.size + 1 - window.num_chunks) * window.size, 0)
    return max(position + 1 - window, 0)


class BlockPattern(msgspec.Struct, frozen=True):
    """The blocks of keys to which each query head attends, without an indexer (Phi-3-small, arXiv 2404.14219).

    A token in block b attends to blocks b - `num_near` + 1 .. b. Head h also attends to each earlier block i for which
    i + 1 + h * `head_step` is a multiple of `stride`.
    """

    block_size: int
    num_near: int
    stride: int
    head_step: int


class TokenBlocks(msgspec.Struct, frozen=True):
    """Attention in both directions within blocks of `size` tokens, the first of which has `first_size` tokens."""

    size: int
    first_size: int


class SpanLayers(IntEnum):
    """The layers in which the tokens of a step attend to the ranges of positions that the step gives for them.

    In other layers, a token attends to those before it. The values are those of `span_layers` of the native library.
    """

    ALL = 0
    WITH_WINDOW = 1
    WITHOUT_WINDOW = 2

    def include(self, window: Window | None) -> bool:
        """Return whether layers with this window are among them."""
        return self is SpanLayers.ALL or (self is SpanLayers.WITH_WINDOW) == (window is not None)
