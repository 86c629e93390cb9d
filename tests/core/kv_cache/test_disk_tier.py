"""The scheduler side of the KV cache on disk: its readiness, and the blocks that it finds."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from engine.core.kv_cache.connectors.disk_tier import DiskTier
from engine.core.kv_cache.connectors.multi_connector import MultiConnector
from engine.protocol.kv_transfer.multi import MultiReport
from engine.protocol.kv_transfer.store import StoreReport
from support.scheduler.harness import Harness
from support.scheduler.model_disks import ModelDisks
from support.scheduler.recorded_harness import RecordedHarness
from support.scheduler.traffic import Traffic, random_harness
from support.suite.examples import share

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


@pytest.mark.slow
@pytest.mark.parametrize("num_disks", [1, 2])
def test_no_answer_changes_in_random_traffic_over_unreliable_disks(num_disks: int) -> None:
    """Every kind of layers, CPU offload, drafts and lost cores. The harness compares each token."""
    num_steps = num_loaded = seed = 0
    while num_steps < share(4_000):
        steps, loaded = run_traffic(random.Random(seed), num_disks)
        num_steps, num_loaded, seed = num_steps + steps, num_loaded + loaded, seed + 1
    assert num_loaded > num_steps / 200


def run_traffic(rng: random.Random, num_disks: int) -> tuple[int, int]:
    """Run random traffic until all requests have ended, and return the numbers of steps and of loaded blocks."""

    def make_harness(**settings: Any) -> Harness:
        return Harness(**settings | {"connector": ModelDisks.make_connector(num_disks)})

    harness = random_harness(rng, make_harness)
    disks = ModelDisks(harness, num_disks, rng)
    traffic = Traffic(harness, rng)
    for _ in range(300):
        traffic.act()
        disks.work()
        if len(harness.scheduler.requests) > 40:
            harness.step()
        if rng.random() < 0.004:
            disks.lose_core()
    num_idle = 0
    while num_idle < 5:
        harness.compile_grammars()
        is_busy = harness.step() or harness.grammar.compiling or harness.has_work
        disks.work()
        harness.now += 0.5
        num_idle = 0 if is_busy or not disks.is_idle else num_idle + 1
    harness.check_empty()
    return len(harness.steps), disks.num_loaded
