"""Find the longest prefix of a request that is cached in every KV-cache group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple, TypeAlias

import msgspec

from ...protocol.kv_cache_groups import AttentionKind, KVCacheGroup
from .block_pool import BlockPool

Lookup: TypeAlias = Callable[[bytes], int | None]


ON_CPU: Final = -1
"""In place of a block number: the content is in CPU memory and must be copied."""

EXTERNAL: Final = -2
"""In place of a block number: a KV connector can load the content."""


FindExternal: TypeAlias = Callable[[Sequence[bytes]], bytes | None]
"""Returns for each key a byte, 1 if a KV connector can load the block; b"" if none; None if the answer is deferred."""


class Deferred(Enum):
    """The answer about a prefix while a KV connector has none yet."""

    DEFERRED = auto()


class Load(NamedTuple):
    """A cached block that must be copied from CPU memory, or loaded by a KV connector, to `blocks[group][position]`."""

    group: int
    position: int
    key: bytes
    is_external: bool


class CachedPrefix(msgspec.Struct, frozen=True, gc=False):
    """The first `num_blocks` blocks of a request, which do not have to be computed.

    `blocks[group]` lists, in order, the blocks that later tokens attend to. `loads` are the blocks among them that must
    be copied from CPU memory or loaded by a KV connector.
    """

    num_blocks: int
    blocks: tuple[list[int], ...]
    loads: Sequence[Load] = ()

    @property
    def num_present(self) -> int:
        """Number of blocks before the first one that must be copied or loaded."""
        if not self.loads:
            return self.num_blocks
        firsts = (
            self.num_blocks - len(self.blocks[load.group]) + load.position for load in self.loads
        )
        return min(firsts)


def group_key(digest: bytes, group: int) -> bytes:
    """Return the cache key of a block: its digest, with the group number appended as one byte except in group 0."""
    return digest + bytes((group,)) if group else digest


def group_keys(digests: Sequence[bytes], group: int) -> Sequence[bytes]:
    """Return the cache keys of several blocks in one group."""
    if not group:
        return digests
    number = bytes((group,))
    return [digest + number for digest in digests]


def find_cached_prefix(
    pool: BlockPool,
    groups: Sequence[KVCacheGroup],
    block_size: int,
    digests: Sequence[bytes],
    lookup: Lookup,
) -> CachedPrefix:
    """Return the longest prefix that is cached in every group.

    Full attention needs every block of the prefix. Sliding windows and recurrent states need only the blocks that the
    next token uses. Cross attention needs none, because the encoder's input is part of every digest.
    """
    num_blocks = len(digests)
    found: dict[int, list[int]] = {}
    windowed: list[tuple[int, KVCacheGroup]] = []
    for number, group in enumerate(groups):
        if group.kind is AttentionKind.FULL:
            found[number] = _find_all(pool, group_keys(digests[:num_blocks], number), lookup)
            num_blocks = len(found[number])
        elif group.kind is AttentionKind.CROSS:
            found[number] = []
        else:
            windowed.append((number, group))
    is_final = not windowed
    while not is_final:
        is_final = True
        for number, group in windowed:
            tail = _find_tail(group, number, block_size, digests[:num_blocks], lookup)
            found[number] = tail.blocks
            if tail.num_blocks < num_blocks:
                num_blocks, is_final = tail.num_blocks, False
    blocks = tuple(
        found[number][:num_blocks] if group.kind is AttentionKind.FULL else found[number]
        for number, group in enumerate(groups)
    )
    return CachedPrefix(num_blocks, blocks, _find_loads(num_blocks, blocks, digests))


def _find_all(pool: BlockPool, keys: Sequence[bytes], lookup: Lookup) -> list[int]:
    """Return the blocks of the longest cached prefix of `keys`."""
    found = pool.find_cached_blocks(keys)
    for key in keys[len(found) :]:
        block = lookup(key)
        if block is None:
            break
        found.append(block)
    return found


def _find_loads(
    num_blocks: int, blocks: tuple[list[int], ...], digests: Sequence[bytes]
) -> list[Load]:
    return [
        Load(
            number,
            position,
            group_key(digests[num_blocks - len(found) + position], number),
            block == EXTERNAL,
        )
        for number, found in enumerate(blocks)
        if ON_CPU in found or EXTERNAL in found
        for position, block in enumerate(found)
        if block < 0
    ]


class _Tail(NamedTuple):
    num_blocks: int
    blocks: list[int]


def _find_tail(
    group: KVCacheGroup, number: int, block_size: int, digests: Sequence[bytes], lookup: Lookup
) -> _Tail:
    """Return the number of blocks in the longest usable prefix, and the blocks in it that the next token sees."""
    num_blocks = len(digests)
    while True:
        first = group.first_visible(num_blocks * block_size) // block_size
        blocks: list[int] = []
        for index in range(num_blocks - 1, first - 1, -1):
            block = lookup(group_key(digests[index], number))
            if block is None:
                # Every shorter prefix that covers this block needs it too, so continue with prefixes that end before
                # it.
                num_blocks = index
                break
            blocks.append(block)
        else:
            blocks.reverse()
            return _Tail(num_blocks, blocks)
