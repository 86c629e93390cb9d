"""Logs of the core loop: scheduler time, statistics, advice on preemption."""

from __future__ import annotations

import logging

import pytest
from engine.core.reporting.preemption_advice import PreemptionAdvice
from engine.core.reporting.request_times import SchedulerTimes
from engine.core.reporting.stats_log import StatsLog
from engine.protocol.arrays import float32_view, int32_bytes
from engine.protocol.messages import SchedulerStats, SpecDecodingStats
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import NewRequestData, SchedulerOutput
from support.scheduler.harness import Harness


def admitted(slot: int, index: int) -> NewRequestData:
    return NewRequestData(slot, (0, index), b"", 0, 0, (b"",), SamplingParams())


def test_the_time_of_a_scheduler_call_counts_for_every_running_request():
    times = SchedulerTimes()
    times.record(SchedulerOutput(1, new_requests=[admitted(0, 7), admitted(1, 8)]), 1.0)
    times.record(SchedulerOutput(2), 2.0)
    times.record(SchedulerOutput(3, removed_slots=int32_bytes([0])), 4.0)
    times.record(None, 8.0)
    times.record(SchedulerOutput(4, new_requests=[admitted(0, 7)]), 16.0)
    # Request 9 never ran.
    seconds = times.take_times(0, int32_bytes([7, 8, 9]))
    assert float32_view(seconds).tolist() == [1 + 2 + 16, 31, 0]
    times.record(
        SchedulerOutput(5, removed_slots=int32_bytes([0, 1]), new_requests=[admitted(1, 10)]), 1.0
    )
    times.remove_client(0)
    assert float32_view(times.take_times(0, int32_bytes([7, 10]))).tolist() == [0, 0]


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return lines


def test_statistics_are_logged_at_intervals_until_the_replica_is_idle(caplog):
    caplog.set_level(logging.INFO)
    log = StatsLog(1, 10.0, now=100.0)
    drafts = SpecDecodingStats(3, 20, 5)
    log.record(
        SchedulerStats(
            step_tokens=int32_bytes([105, 4]),
            num_prompt_tokens=100,
            num_scheduled_tokens=240,
            prefix_cache_queries=100,
            prefix_cache_hits=32,
            num_preemptions=2,
            spec_decoding=drafts,
        )
    )
    log.write_if_due(109.0, 4, 1, 0.25)
    assert logged(caplog) == []
    log.write_if_due(110.0, 4, 1, 0.25)
    assert logged(caplog) == [
        "replica 1: 24.0 computed tokens/s, 10.0 prompt tokens/s, 0.9 generated tokens/s, 4 running, 1 waiting, "
        "KV cache 25.0% used, prefix cache hits 32.0%, drafts accepted 25.0%, 2 preemptions"
    ]
    log.write_if_due(120.0, 0, 0, 0.0)
    assert logged(caplog) == [
        "replica 1: 0.0 computed tokens/s, 0.0 prompt tokens/s, 0.0 generated tokens/s, 0 running, 0 waiting, "
        "KV cache 0.0% used"
    ]
    log.write_if_due(130.0, 0, 0, 0.0)
    assert logged(caplog) == []


def test_preemption_advice_is_logged_once_a_minute(caplog):
    advice = PreemptionAdvice()
    advice.record(0, 1.0)
    assert logged(caplog) == []
    advice.record(2, 2.0)
    (line,) = logged(caplog)
    assert "2 sequences were preempted (2 since the start)" in line
    for flag in ("--kv-cache-memory-bytes", "--gpu-memory-utilization", "--max-num-seqs"):
        assert flag in line
    advice.record(3, 30.0)
    advice.record(0, 61.0)
    assert logged(caplog) == []
    advice.record(1, 62.0)
    (line,) = logged(caplog)
    assert "4 sequences were preempted (6 since the start)" in line


def test_only_preemptions_for_lack_of_blocks_log_advice():
    full = Harness(num_blocks=10, max_num_seqs=4, enable_prefix_caching=False)
    for index in range(3):
        full.add([index + 1] * 10, 14)
    full.drain()
    lacking = sum(stats.num_block_preemptions for stats in full.stats)
    assert lacking == sum(stats.num_preemptions for stats in full.stats) > 0

    displaced = Harness(max_num_seqs=1, policy="priority", priority_preemption=True)
    displaced.add(6, 10, priority=5)
    displaced.step()
    displaced.add([9] * 6, 2, priority=0)
    displaced.drain()
    assert sum(stats.num_preemptions for stats in displaced.stats) == 1
    assert sum(stats.num_block_preemptions for stats in displaced.stats) == 0
