"""The scheduler side of the KV cache on disk: its readiness, and the blocks that it finds."""

from __future__ import annotations

import msgspec
from engine.core.kv_cache.connectors.disk_tier import DiskTier
from engine.core.kv_cache.connectors.multi_connector import MultiConnector
from engine.protocol.kv_transfer.multi import MultiReport
from engine.protocol.kv_transfer.store import StoreReport
from support.recorded_harness import RecordedHarness

KEYS = [b"%032d" % number for number in range(3)]


def report(tier: DiskTier, rank: int, keys: list[bytes], capacity: int = 0) -> None:
    tier.receive(rank, msgspec.msgpack.encode(StoreReport(capacity, stored=keys)))


def test_disk_tier_is_ready_once_all_workers_have_sent_their_index() -> None:
    tier = DiskTier(num_workers=2)
    harness = RecordedHarness()
    request = harness.request(harness.add(4))
    report(tier, 0, KEYS, capacity=8)
    report(tier, 1, KEYS[:2])
    assert not tier.is_ready()
    assert tier.find_blocks(request, KEYS) == b""
    report(tier, 1, [], capacity=8)
    assert tier.is_ready()
    assert tier.find_blocks(request, KEYS) == b"\1\1\0"


def test_a_disk_that_fails_delays_no_start() -> None:
    tier = DiskTier()
    tier.receive(0, msgspec.msgpack.encode(StoreReport(capacity=8, is_off=True)))
    assert tier.is_ready()


def test_multi_connector_is_ready_when_all_its_connectors_are() -> None:
    multi = MultiConnector([DiskTier()])
    assert not multi.is_ready()
    multi.receive(
        0, msgspec.msgpack.encode(MultiReport(0, msgspec.msgpack.encode(StoreReport(capacity=1))))
    )
    assert multi.is_ready()
