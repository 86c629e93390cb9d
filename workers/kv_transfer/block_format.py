"""The format of a worker's blocks, by which two workers find out whether they can exchange them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ...protocol.kv_transfer.direct import FetchBlocks

if TYPE_CHECKING:
    from .block_memory import BlockMemory
    from .block_regions import BlockRegions, PeerRank


class BlockFormat(msgspec.Struct, frozen=True):
    """The format of the blocks in `memory`.

    Attributes:
        fingerprint: A hash of all that determines the bytes of whole blocks, besides their keys.
        block_size: The number of tokens in a block.
        regions: The parts that ranks divide; None if only whole blocks are exchanged.
    """

    memory: BlockMemory
    fingerprint: bytes
    block_size: int
    regions: BlockRegions | None

    def describe_reader(self, source: PeerRank | None) -> tuple[bytes, int, int]:
        """Return the fingerprint, rank and number of ranks that a request for blocks of a peer has."""
        if source is None or self.regions is None:
            return self.fingerprint, 0, 0
        return self.regions.fingerprint, self.regions.own.rank, self.regions.own.size

    def find_refusal(self, message: FetchBlocks) -> str:
        """Return why a peer cannot read blocks from here, or "" if it can."""
        if message.block_size != self.block_size:
            return (
                f"its blocks have {message.block_size} tokens, and those of the other server {self.block_size}; use "
                "the same --block-size"
            )
        if not message.tp_size:
            is_same = message.fingerprint == self.fingerprint
        elif self.regions is None or message.tp_rank >= message.tp_size:
            return "the other server exchanges only whole blocks"
        else:
            is_same = message.fingerprint == self.regions.fingerprint
        if is_same:
            return ""
        return (
            "the two servers differ in weights, --dtype, --kv-cache-dtype, --pipeline-parallel-size, device, version "
            "or draft head"
        )

    def part_of(self, key: bytes, data: bytes, reader: PeerRank) -> bytes:
        """Return the bytes of a block that this worker has for a rank of another server."""
        assert self.regions is not None
        return self.regions.read(key, self.memory.parts(memoryview(data)), reader)
