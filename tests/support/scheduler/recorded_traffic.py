"""Schedulers with a log of events and some traffic."""

from __future__ import annotations

import random
from functools import partial

from support.scheduler.recorded_harness import RecordedHarness
from support.scheduler.traffic import Traffic, random_harness

SMALL_SEGMENT = 20_000


def record(seed: int, segment_bytes: int, num_actions: int = 300) -> RecordedHarness:
    rng = random.Random(seed)
    harness = random_harness(rng, partial(RecordedHarness, segment_bytes=segment_bytes))
    traffic = Traffic(harness, rng)
    for _ in range(num_actions):
        traffic.act()
        if len(harness.scheduler.requests) > 60:
            harness.step()
    return harness


def contended() -> RecordedHarness:
    harness = RecordedHarness(num_blocks=30, max_num_seqs=3, max_num_batched_tokens=16)
    for index in range(12):
        harness.add([index + 1] * 9, 12)
    harness.drain()
    return harness
