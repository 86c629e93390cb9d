"""Content hashes of full KV-cache blocks.

A block's hash covers its parent's hash, its tokens and whatever else decides its content (cache
salt, LoRA, multimodal inputs), so equal hashes mean equal KV entries of the whole prefix. The
chain is that of vLLM's automatic prefix caching; sha256 keeps a tenant from forging a collision.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

HASH_BYTES: Final = 32

PlacedInput: TypeAlias = tuple[int, int, bytes]
"""(position, number of tokens, content hash) of a multimodal input; it may begin before position 0."""

ROOT_HASH: Final = sha256(b"engine.block.v1").digest()
"""The parent of every first block."""


def root_hash(*, cache_salt: str | None = None, lora_name: str | None = None) -> bytes:
    """The parent hash of a request's first block; distinct extra keys never share a block."""
    if cache_salt is None and lora_name is None:
        return ROOT_HASH
    return sha256(ROOT_HASH + msgspec.msgpack.encode((cache_salt, lora_name))).digest()


def hash_blocks(
    token_ids: npt.NDArray[np.int32],
    block_size: int,
    parent: bytes = ROOT_HASH,
    inputs: Iterable[PlacedInput] = (),
) -> bytes:
    """Hash every full block of `token_ids` (int32[T]); `inputs` are in the place of some of them.

    Returns the concatenated digests, `HASH_BYTES` each, of the T // block_size full blocks.
    """
    stride = block_size * 4
    data = memoryview(np.ascontiguousarray(token_ids, dtype="<i4").tobytes())
    digests = []
    keys = _input_keys(block_size, inputs)
    for index, start in enumerate(range(0, len(data) - stride + 1, stride)):
        hasher = sha256(parent)
        hasher.update(data[start : start + stride])
        if index in keys:
            hasher.update(keys[index])
        parent = hasher.digest()
        digests.append(parent)
    return b"".join(digests)


def _input_keys(block_size: int, inputs: Iterable[PlacedInput]) -> dict[int, bytes]:
    """What each block with inputs in it is hashed with: their content, length, and where in the block they begin."""
    keys: dict[int, bytes] = {}
    for position, num_tokens, content_hash in inputs:
        end = position + num_tokens
        for index in range(max(0, position) // block_size, -(-end // block_size)):
            start = position - index * block_size
            key = msgspec.msgpack.encode((content_hash, start, num_tokens))
            keys[index] = keys.get(index, b"") + key
    return keys
