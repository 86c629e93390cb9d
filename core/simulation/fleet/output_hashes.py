"""The hashes of blocks of generated tokens in a simulation, which generates no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import shake_128
from itertools import pairwise

from ....protocol.arrays import Int32Array
from ....protocol.block_hash import HASH_BYTES, PlacedInput
from ..trace import TraceRequest


class OutputHashes:
    """A hash function for generated blocks.

    It returns the recorded hashes, which later prompts of a conversation contain, and otherwise hashes that no prompt
    contains.
    """

    def __init__(self) -> None:
        self._next: dict[bytes, bytes] = {}

    def add_request(self, request: TraceRequest) -> None:
        """Add the recorded hashes of a request's output."""
        if request.output_hashes:
            hashes = request.block_hashes[-HASH_BYTES:] + request.output_hashes
            starts = range(0, len(hashes), HASH_BYTES)
            self._next.update(pairwise(hashes[start : start + HASH_BYTES] for start in starts))

    def __call__(
        self, token_ids: Int32Array, block_size: int, parent: bytes, inputs: Sequence[PlacedInput]
    ) -> bytes:
        """Return the hashes of the full blocks that follow `parent`."""
        num_blocks = len(token_ids) // block_size
        known: list[bytes] = []
        while len(known) < num_blocks and (following := self._next.get(parent)):
            known.append(following)
            parent = following
        # Every parent is different, so the hashes of different requests are.
        return b"".join(known) + shake_128(parent).digest(HASH_BYTES * (num_blocks - len(known)))
