"""Each step's time is divided among its requests in proportion to their tokens."""

from __future__ import annotations

import pytest
from engine.core.reporting.core_times import CoreTimes
from engine.protocol.arrays import float32_view, int32_bytes
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import NewRequestData, SchedulerOutput


def admitted(slot: int, index: int) -> NewRequestData:
    return NewRequestData(slot, (0, index), b"", 0, 0, (b"",), SamplingParams())


def step(number: int, new: list[tuple[int, int]] = (), **arrays: list) -> SchedulerOutput:
    fields = {name: int32_bytes(values) for name, values in arrays.items()}
    return SchedulerOutput(number, new_requests=[admitted(*each) for each in new], **fields)


def taken(times: CoreTimes, *indices: int) -> list[float]:
    return float32_view(times.take_times(0, int32_bytes(list(indices)))).tolist()


def test_step_time_is_divided_among_requests_by_tokens() -> None:
    times = CoreTimes(max_num_seqs=4, num_cores=2)
    # Slot 3 computes 7 prompt tokens, and slot 1 one token.
    times.record(step(1, [(3, 8), (1, 9)], slots=[3, 1], chunks=[0, 7]), 4.0)
    times.record(step(2), 1.0)
    assert taken(times, 8, 9, 10) == pytest.approx([7 + 1, 1 + 1, 0])
    # The rows continue for one more step, but their requests have been reported.
    times.record(step(3), 1.0)
    assert taken(times, 8, 9) == [0, 0]


def test_preempted_request_keeps_its_time_and_a_slot_belongs_to_one_request() -> None:
    times = CoreTimes(max_num_seqs=2)
    times.record(step(1, [(0, 1), (1, 2)], slots=[0, 1]), 2.0)
    times.record(step(2, [(0, 3)], removed_slots=[0], slots=[0, 1]), 2.0)
    times.record(step(3, [(1, 1)], removed_slots=[1], slots=[1]), 5.0)
    assert taken(times, 1, 2, 3) == [1 + 5, 1 + 1, 1]


def test_all_time_of_the_workers_is_given_to_requests() -> None:
    times = CoreTimes(max_num_seqs=3)
    times.record(step(1, [(0, 1), (1, 2)], slots=[0, 1], chunks=[0, 5, 1, 3]), 1.5)
    times.record(step(2, slots=[1]), 0.5)
    times.record(step(3, [(2, 3)], slots=[0, 1, 2], chunks=[2, 9]), 2.0)
    assert sum(taken(times, 1, 2, 3)) == pytest.approx(4.0)


def test_requests_of_a_lost_client_are_removed() -> None:
    times = CoreTimes(max_num_seqs=1)
    times.record(step(1, [(0, 1)], slots=[0]), 1.0)
    times.remove_client(0)
    assert taken(times, 1) == [0]
