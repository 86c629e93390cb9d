"""Prompts are routed to replicas with a cached prefix, but never at the cost of balance."""

from __future__ import annotations

from engine.protocol.arrays import uint64_bytes
from engine.protocol.messages import ReplicaLoadUpdate
from engine.protocol.routing.cached_prefixes import CachedPrefixes
from engine.protocol.routing.choice import HEADROOM, choose_replica
from hypothesis import given
from hypothesis import strategies as st

MAX_NUM_SEQS = 64


def chosen(
    loads: list[int],
    num_cached: list[int],
    num_blocks: int = 10,
    home: int = 0,
    has_adapter: list[bool] | None = None,
) -> int:
    cached = {index: count for index, count in enumerate(num_cached) if count}
    with_adapter = [index for index, has in enumerate(has_adapter or ()) if has]
    return choose_replica(loads, cached, num_blocks, home, MAX_NUM_SEQS, with_adapter)


def test_without_cached_blocks_the_least_loaded_is_chosen() -> None:
    assert chosen([3, 2, 4], [0, 0, 0]) == 1


def test_equally_loaded_replicas_are_chosen_by_prompt_hash() -> None:
    assert {home: chosen([2, 2, 2], [0, 0, 0], home=home) for home in range(4)} == {
        0: 0,
        1: 1,
        2: 2,
        3: 0,
    }


def test_the_longest_cached_prefix_outweighs_the_least_load() -> None:
    assert chosen([5, 3, 2], [9, 7, 0]) == 0


def test_a_prefix_of_less_than_half_the_prompt_is_not_waited_for() -> None:
    assert chosen([3, 2], [4, 0]) == 1
    assert chosen([2, 2], [4, 0], home=1) == 0


def test_a_prefix_is_recomputed_on_an_idle_replica() -> None:
    assert chosen([HEADROOM, 0], [9, 0]) == 0
    assert chosen([HEADROOM + 1, 0], [9, 0]) == 1
    assert chosen([40, 20], [9, 0]) == 0
    assert chosen([41, 20], [9, 0]) == 1
    assert chosen([MAX_NUM_SEQS, 50], [9, 0]) == 1


def test_loaded_adapter_outweighs_lower_load_and_cached_prefix() -> None:
    assert chosen([5, 3, 2], [9, 9, 0], has_adapter=[False, True, False]) == 1
    assert chosen([3, 3, 2], [9, 0, 0], has_adapter=[True, True, False]) == 0
    assert chosen([HEADROOM, 0], [0, 0], has_adapter=[True, False]) == 0


def test_an_adapter_is_loaded_on_an_idle_replica() -> None:
    assert chosen([HEADROOM + 1, 0], [0, 9], has_adapter=[True, False]) == 1
    assert chosen([41, 20], [9, 0], has_adapter=[True, False]) == 1
    # Ties go to the adapter's own replica, so that all frontends choose the same one.
    assert chosen([0, 0], [0, 0], home=7, has_adapter=[False, False]) == 1


@given(
    st.lists(
        st.tuples(st.integers(0, 200), st.integers(0, 10), st.booleans()),
        min_size=1,
    ),
    st.integers(),
)
def test_replicas_are_balanced_whatever_is_cached(
    replicas: list[tuple[int, int, bool]], home: int
) -> None:
    loads, cached, has_adapter = (list(each) for each in zip(*replicas, strict=True))
    load = loads[chosen(loads, cached, home=home, has_adapter=has_adapter)]
    assert load <= max(min(loads) + HEADROOM, 2 * min(loads))


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 10), st.booleans()), min_size=1),
    st.integers(),
)
def test_no_replica_within_the_bound_is_better(
    replicas: list[tuple[int, int, bool]], home: int
) -> None:
    loads, cached, has_adapter = (list(each) for each in zip(*replicas, strict=True))

    def preference(index: int) -> tuple[bool, int, int, int, int]:
        worth_a_wait = cached[index] if cached[index] >= 5 else 0
        distance = (index - home) % len(loads)
        return not has_adapter[index], -worth_a_wait, loads[index], -cached[index], distance

    allowed = [index for index, load in enumerate(loads) if load <= min(loads) + HEADROOM]
    assert chosen(loads, cached, home=home, has_adapter=has_adapter) == min(allowed, key=preference)


def test_blocks_of_a_running_sequence_count_as_cached() -> None:
    prefixes = CachedPrefixes()
    prefixes.add_expected([1, 2, 3])
    prefixes.add_expected([1, 2])
    assert prefixes.count_blocks([1, 2, 3, 4]) == 3
    prefixes.remove_expected([1, 2, 3])
    assert prefixes.count_blocks([1, 2, 3, 4]) == 2
    prefixes.apply_update(ReplicaLoadUpdate(0, stored=uint64_bytes([1])))
    prefixes.remove_expected([1, 2])
    assert prefixes.count_blocks([1, 2, 3, 4]) == 1
    prefixes.clear()
    assert prefixes.count_blocks([1]) == 0
