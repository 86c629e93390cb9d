"""KV-cache events to which external routers subscribe.

The encoding is the same as in vLLM: msgpack maps, with an event's class in "type". A published message has three
frames: topic, sequence number (8 bytes, big-endian), `KVEventBatch`.
"""

from __future__ import annotations

import enum
from typing import Final, TypeAlias

import msgspec

END_OF_REPLAY: Final = b"\xff" * 8
"""The sequence number of the empty message that ends a replay."""

MAX_BLOCK_CELLS: Final = 4096
"""Maximum length of a description of the KV cache; of larger caches, it has every N-th block."""


class BlockState(enum.StrEnum):
    """The state of a block of the KV cache. Cached blocks are free, and have content that a prefix may find."""

    EMPTY = "."
    CACHED = "c"
    USED = "u"
    SHARED = "s"


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Consecutive full blocks became findable.

    `token_ids` are their tokens, and `medium` says where they are stored.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks are no longer findable."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """The whole cache was reset."""


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, omit_defaults=True, gc=False):
    """The events of one step, in order. `ts` is in seconds since 1970."""

    ts: float
    events: list[KVCacheEvent]
    data_parallel_rank: int | None = None
