"""Updates from a core keep its frontends' copies of its state correct."""

from __future__ import annotations

import numpy as np
from engine.core.reporting.client_updates import ClientUpdates
from engine.protocol.block_hash import HASH_BYTES, adapter_key, block_keys, hash_blocks
from engine.protocol.file_identity import LoraAdapter
from engine.protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from engine.protocol.messages import ReplicaLoadUpdate
from engine.protocol.routing.cached_prefixes import CachedPrefixes
from engine.protocol.worker_messages import LoraLoad
from hypothesis import given
from hypothesis import strategies as st

HASHES = [hash_blocks(np.arange(4, dtype=np.int32) + i, 4) for i in range(12)]


def stored(*indices: int) -> KVCacheEvent:
    return BlockStored([HASHES[i] for i in indices], None, [], 4, None, None, None)


def removed(*indices: int) -> KVCacheEvent:
    return BlockRemoved([HASHES[i] for i in indices], None)


events = st.one_of(
    st.lists(st.integers(0, 11), min_size=1).map(lambda indices: stored(*indices)),
    st.lists(st.integers(0, 11), min_size=1).map(lambda indices: removed(*indices)),
    st.just(AllBlocksCleared()),
)


def have(event: KVCacheEvent, cached: set[bytes]) -> set[bytes]:
    if isinstance(event, BlockStored):
        return cached | set(event.block_hashes)
    return cached - set(event.block_hashes) if isinstance(event, BlockRemoved) else set()


@given(st.lists(st.lists(events, max_size=4), max_size=8), st.integers(0, 7))
def test_a_frontend_mirrors_the_cached_blocks_whenever_it_connects(
    batches: list[list[KVCacheEvent]], late: int
) -> None:
    update = ClientUpdates()
    frontends = {0: CachedPrefixes(), 1: CachedPrefixes()}
    update.add_client(0)
    cached: set[bytes] = set()
    for number, batch in enumerate([*batches, []]):
        if number == min(late, len(batches)):
            update.add_client(1)
        for event in batch:
            cached = have(event, cached)
        update.apply_events(batch)
        for client_index, message in update.take_updates():
            frontends[client_index].apply_update(message)
    for prefixes in frontends.values():
        found = {digest for digest in HASHES if prefixes.count_blocks(block_keys(digest))}
        assert found == cached


def test_frontends_receive_which_adapters_the_workers_have() -> None:
    update, prefixes = ClientUpdates(), CachedPrefixes()
    update.add_client(0)
    adapters = [LoraAdapter(name, "", name.encode() * HASH_BYTES) for name in "abc"]

    def held() -> str:
        for _, message in update.take_updates():
            prefixes.apply_update(message)
        return "".join(each.name for each in adapters if prefixes.has(adapter_key(each.version)))

    assert held() == ""
    a, b, c = adapters
    update.begin_loads([LoraLoad(0, a), LoraLoad(1, b)])
    assert held() == "ab"
    # The adapter replaces another one, and a load fails.
    update.begin_loads([LoraLoad(0, c)])
    update.drop_adapter(1)
    assert held() == "c"
    update.apply_events([AllBlocksCleared()])
    assert held() == "c"
    prefixes.clear()
    update.add_client(0)
    assert held() == "c"


def test_each_frontend_receives_the_request_counts_of_the_others() -> None:
    update = ClientUpdates()
    update.add_client(0)
    update.add_client(1)
    assert dict(update.take_updates()) == {i: ReplicaLoadUpdate(0, is_whole=True) for i in (0, 1)}
    update.add_requests(0, 3)
    assert dict(update.take_updates()) == {1: ReplicaLoadUpdate(3)}
    update.add_requests(1, 2)
    update.remove_requests(0, 1)
    assert dict(update.take_updates()) == {0: ReplicaLoadUpdate(2), 1: ReplicaLoadUpdate(2)}
    assert dict(update.take_updates()) == {}
    update.remove_client(0)
    assert dict(update.take_updates()) == {1: ReplicaLoadUpdate(0)}
