"""KV-cache groups: layers that share a block table because they need the same part of a sequence.

A model's layers are divided into groups of equal size, so that a block takes the same memory in every group and all
groups share one pool. A recurrent state that is larger than a block is divided among several groups, and so are five
sliding-window layers per full-attention layer.
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
    """The part of a sequence whose keys and values, or state, a layer needs."""

    FULL = 0
    SLIDING_WINDOW = 1
    CHUNKED_LOCAL = 2
    STATE_SPACE = 3
    CROSS = 4


class KVCacheGroup(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """Layers that read the same blocks.

    The meaning of `size`, in tokens, depends on the kind. Sliding window: the number of tokens that a token attends to,
    itself included. Chunked attention: the length of a chunk, whose tokens attend only to each other. Cross attention:
    the maximum length of the encoder's output. State space: the length of a segment. If cross attention `is_optional`,
    a request has blocks only for the images that it reads together.

    A state-space layer needs the state after the previous token. A block stores the state after the last computed of
    its tokens, which also serves as the state of the earlier tokens of its segment.
    """

    kind: AttentionKind = AttentionKind.FULL
    size: int = 0
    is_optional: bool = False

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

        A state cannot be computed backward. Drafts must therefore neither complete a segment nor enter another block
        than the last certain token. The stored state then serves whether all, some or none of the drafts are accepted.
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

        Steps compute at most `max_step_tokens` tokens of it. At most `max_uncertain_tokens` tokens of steps that verify
        drafts are in flight.
        """
        num_blocks = -(-num_tokens // block_size)
        match self.kind:
            case AttentionKind.FULL:
                return num_blocks
            case AttentionKind.SLIDING_WINDOW | AttentionKind.CHUNKED_LOCAL:
                # The blocks that the window of a token at a block boundary covers, and the blocks that one step adds.
                num_new = min(max_step_tokens, num_tokens)
                num_visible = -(-(self.size - 1) // block_size)
                return min(num_blocks, num_visible + -(-(num_new - 1) // block_size) + 1)
            case AttentionKind.STATE_SPACE:
                # The block that is read, and the blocks that may be written.
                return min(num_blocks, 1 + max(1, -(-max_uncertain_tokens // block_size)))
            case AttentionKind.CROSS:
                return -(-self.size // block_size)


FULL_ATTENTION = (KVCacheGroup(),)
"""The groups of a model in which all layers have full attention."""


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
    """Return the maximum length of a request that fits into `num_blocks` blocks, at most `limit` tokens."""
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
