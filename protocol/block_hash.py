"""Content hashes of full KV-cache blocks.

A block's hash covers its parent's hash, its tokens and everything else that determines its content (cache salt, LoRA,
multimodal inputs). Equal hashes therefore mean equal keys and values for the whole prefix. The chain is the same as in
vLLM's automatic prefix caching. The default, sha256, prevents tenants from forging collisions. xxh3 takes half the
time, for servers whose users are all trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Final, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from .arrays import Int32Array, uint64_view
from .config import PrefixHash

HASH_BYTES: Final = 32
"""Size of a hash in bytes, for every algorithm. Shorter digests are padded with zeros."""

PlacedInput: TypeAlias = tuple[int, int, bytes]
"""(position, number of tokens, content hash) of a multimodal input. The position is negative if it began earlier."""

HashBlocks: TypeAlias = Callable[[Int32Array, int, bytes, Sequence[PlacedInput]], bytes]
"""`hash_blocks` with its algorithm fixed, or a replacement for it in a replay, which has no tokens."""

ROOT_HASH: Final = sha256(b"engine.block.v1").digest()
"""The parent hash of every first block of a prompt without a cache salt, LoRA adapter or owner."""


def root_hash(
    *, cache_salt: str | None = None, lora_version: bytes | None = None, owner: bytes = b""
) -> bytes:
    """Return the parent hash of a request's first block. Requests with different root hashes never share a block.

    With an `owner`, blocks are shared only among requests of the same owner, even if the salts are equal.
    """
    if owner:
        return sha256(
            ROOT_HASH + msgspec.msgpack.encode((cache_salt, lora_version, owner))
        ).digest()
    if cache_salt is None and lora_version is None:
        return ROOT_HASH
    return sha256(ROOT_HASH + msgspec.msgpack.encode((cache_salt, lora_version))).digest()


def hash_blocks(
    token_ids: npt.NDArray[np.int32],
    block_size: int,
    parent: bytes = ROOT_HASH,
    inputs: Iterable[PlacedInput] = (),
    algorithm: PrefixHash = PrefixHash.SHA256,
) -> bytes:
    """Return the concatenated digests, `HASH_BYTES` each, of all full blocks of `token_ids`.

    Args:
        token_ids: int32[T]; the first T // block_size blocks are full.
        block_size: Tokens per block.
        parent: The hash of the block before the first one.
        inputs: Multimodal inputs that replace some of the tokens.
        algorithm: The hash function.
    """
    stride = block_size * 4
    data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    digests = []
    keys = _input_keys(block_size, inputs)
    new_hash = _hash_function(algorithm)
    padding = bytes(HASH_BYTES - new_hash(b"").digest_size)
    for index, start in enumerate(range(0, len(data) - stride + 1, stride)):
        content = parent + data[start : start + stride]
        if keys and index in keys:
            content += keys[index]
        parent = new_hash(content).digest() + padding
        digests.append(parent)
    return b"".join(digests)


def adapter_key(version: bytes) -> int:
    """Return a short key for a LoRA adapter, given the hash of its files; used to route requests to replicas."""
    return int.from_bytes(version[:8], "little")


def block_keys(hashes: bytes) -> list[int]:
    """Return a short key for each of the concatenated `hashes`: its first 8 bytes as a little-endian integer."""
    keys: list[int] = uint64_view(hashes)[:: HASH_BYTES // 8].tolist()
    return keys


def block_hasher(algorithm: PrefixHash) -> HashBlocks:
    """Return `hash_blocks` with a fixed algorithm."""

    def hash_with(
        token_ids: Int32Array, block_size: int, parent: bytes, inputs: Sequence[PlacedInput]
    ) -> bytes:
        return hash_blocks(token_ids, block_size, parent, inputs, algorithm)

    return hash_with


class _Hash(Protocol):
    @property
    def digest_size(self) -> int: ...

    def digest(self) -> bytes: ...


def _hash_function(algorithm: PrefixHash) -> Callable[[bytes], _Hash]:
    match algorithm:
        case PrefixHash.SHA256:
            return sha256
        case PrefixHash.XXH3:
            from xxhash import xxh3_128  # An optional dependency

            return xxh3_128


def _input_keys(block_size: int, inputs: Iterable[PlacedInput]) -> dict[int, bytes]:
    """Return, for each block with inputs, the bytes that its hash covers: content, length and offset of each input.

    An input of zero tokens belongs to an encoder-decoder model. All tokens depend on it, so it is hashed with the first
    block.
    """
    keys: dict[int, bytes] = {}
    for position, num_tokens, content_hash in inputs:
        end = position + num_tokens
        last = max(end, position + 1) if position >= 0 else end
        for index in range(max(0, position) // block_size, -(-last // block_size)):
            start = position - index * block_size
            key = msgspec.msgpack.encode((content_hash, start, num_tokens))
            keys[index] = keys.get(index, b"") + key
    return keys
