"""What happens to cached blocks, as routers outside subscribe to it.

The encoding is that of vLLM's KV-cache events, so that its subscribers understand it: msgpack maps, an event's
class in its "type". A published message has three frames: topic, sequence number (8 bytes, big-endian),
`KVEventBatch`.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

END_OF_REPLAY: Final = b"\xff" * 8
"""The sequence number of the last, empty frame of a replay."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Consecutive full blocks became findable; `token_ids` are theirs, `medium` is where they are."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks are findable no more."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """The cache was reset."""


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, omit_defaults=True, gc=False):
    """Events of one step in order; `ts` is in seconds since the epoch."""

    ts: float
    events: list[KVCacheEvent]
    data_parallel_rank: int | None = None
