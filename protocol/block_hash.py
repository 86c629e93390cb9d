"""Content hashes of full KV-cache blocks.

A block's hash covers its parent's hash, its tokens and whatever else decides its content (cache
salt, LoRA, multimodal inputs), so equal hashes mean equal KV entries of the whole prefix. The
chain is that of vLLM's automatic prefix caching; sha256 keeps a tenant from forging a collision.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

HASH_BYTES: Final = 32

ROOT_HASH: Final = sha256(b"engine.block.v1").digest()
"""The parent of every first block."""


def root_hash(*, cache_salt: str | None = None, lora_name: str | None = None) -> bytes:
    """The parent hash of a request's first block; distinct extra keys never share a block."""
    if cache_salt is None and lora_name is None:
        return ROOT_HASH
    return sha256(ROOT_HASH + msgspec.msgpack.encode((cache_salt, lora_name))).digest()


def hash_blocks(
    token_ids: npt.NDArray[np.int32], block_size: int, parent: bytes = ROOT_HASH
) -> bytes:
    """Hash every full block of `token_ids` (int32[T]).

    Returns the concatenated digests, `HASH_BYTES` each, of the T // block_size full blocks.
    """
    stride = block_size * 4
    data = memoryview(np.ascontiguousarray(token_ids, dtype="<i4").tobytes())
    digests = []
    for start in range(0, len(data) - stride + 1, stride):
        hasher = sha256(parent)
        hasher.update(data[start : start + stride])
        parent = hasher.digest()
        digests.append(parent)
    return b"".join(digests)
