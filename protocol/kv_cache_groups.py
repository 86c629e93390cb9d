"""KV-cache groups: layers that share a block table because they need the same part of a sequence.

A model's layers are divided into groups of equal size, so that a block of any group takes the same memory and all
groups share one pool. A state larger than a block, or five windowed layers for each full one, becomes several groups
and thereby several blocks.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

if TYPE_CHECKING:
    from .arrays import Int32Array, Int64Array

Position = TypeVar("Position", int, "Int64Array")


class AttentionKind(enum.IntEnum):
    """The part of a sequence that a layer needs."""

    FULL = 0
    SLIDING_WINDOW = 1
    CHUNKED_LOCAL = 2
    STATE_SPACE = 3
    CROSS = 4


class KVCacheGroup(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """Layers that read the same blocks.

    `size` is in tokens. For a sliding window it is the number of tokens that a token sees, itself included. For chunked
    attention it is the length of a chunk, whose tokens see only each other. For cross attention it is the maximum
    length of the encoder's output. A state-space layer sees its state after the previous token; a block holds the state
    after the last computed of its tokens. Its size is the length of a segment: a state also serves as that of the
    earlier tokens of its segment.
    """

    kind: AttentionKind = AttentionKind.FULL
    size: int = 0

    def first_visible(self, position: Position) -> Position:
        """Return the first token whose block is read when the token at `position` is computed."""
        match self.kind:
            case AttentionKind.SLIDING_WINDOW:
                return _at_least_zero(position - (self.size - 1))
            case AttentionKind.CHUNKED_LOCAL:
                return position - position % self.size
            case AttentionKind.STATE_SPACE:
                return _at_least_zero(position - 1)
            case AttentionKind.FULL | AttentionKind.CROSS:
                return position - position

    def limit_drafts(
        self, num_drafts: Int32Array, num_tokens: Int32Array, block_size: int
    ) -> Int32Array:
        """Return how many drafts after the first `num_tokens` tokens a step may compute, at most `num_drafts`.

        A state cannot be computed backward. So drafts do not complete a segment, and do not enter another block than
        the last certain token: the state after them then serves as that after any of them, or after none.
        """
        if self.kind is not AttentionKind.STATE_SPACE:
            return num_drafts
        segment = max(self.size, 1)
        return num_drafts.clip(
            max=np.minimum(segment - 1 - num_tokens % segment, -num_tokens % block_size)
        )

    def max_blocks(
        self, num_tokens: int, max_step_tokens: int, block_size: int, max_uncertain_tokens: int = 0
    ) -> int:
        """Return the maximum number of blocks that a request of `num_tokens` tokens holds.

        It is computed in steps of at most `max_step_tokens` tokens. Of steps that verify drafts, at most
        `max_uncertain_tokens` tokens are in flight.
        """
        num_blocks = -(-num_tokens // block_size)
        match self.kind:
            case AttentionKind.FULL:
                return num_blocks
            case AttentionKind.SLIDING_WINDOW | AttentionKind.CHUNKED_LOCAL:
                visible = self.size + min(max_step_tokens, num_tokens) - 1
                return min(num_blocks, (visible + block_size - 2) // block_size + 1)
            case AttentionKind.STATE_SPACE:
                # The block that is read, and those that may be written.
                return min(num_blocks, 1 + max(1, -(-max_uncertain_tokens // block_size)))
            case AttentionKind.CROSS:
                return -(-self.size // block_size)


FULL_ATTENTION = (KVCacheGroup(),)
"""The groups of a model without windows."""


def max_request_blocks(
    groups: tuple[KVCacheGroup, ...],
    num_tokens: int,
    max_step_tokens: int,
    block_size: int,
    max_uncertain_tokens: int = 0,
) -> int:
    """Return the maximum number of blocks that a request of `num_tokens` tokens holds in all groups."""
    return sum(
        group.max_blocks(num_tokens, max_step_tokens, block_size, max_uncertain_tokens)
        for group in groups
    )


def max_request_tokens(
    groups: tuple[KVCacheGroup, ...],
    num_blocks: int,
    max_step_tokens: int,
    block_size: int,
    limit: int,
    max_uncertain_tokens: int = 0,
) -> int:
    """Return the maximum length of a request, up to `limit` tokens, that holds at most `num_blocks` blocks."""
    fits, too_long = 0, limit + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        needed = max_request_blocks(
            groups, middle, max_step_tokens, block_size, max_uncertain_tokens
        )
        if needed <= num_blocks:
            fits = middle
        else:
            too_long = middle
    return fits


def _at_least_zero(position: Position) -> Position:
    return position * (position > 0)
