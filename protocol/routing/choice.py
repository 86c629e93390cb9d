"""Choose a replica for a prompt."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

HEADROOM: Final = 4
"""The number of sequences by which a replica with the prefix or adapter may exceed the least loaded one."""


def highest_load(least: int, max_num_seqs: int) -> int:
    """Return the highest load at which a replica gets requests because of its cache.

    Args:
        least: The number of sequences at the least loaded replica.
        max_num_seqs: The number of sequences that a replica runs at once.
    """
    return max(least + HEADROOM, min(2 * least, max_num_seqs - 1))


def choose_replica(
    loads: Sequence[int],
    num_cached: Mapping[int, int],
    num_blocks: int,
    home: int,
    max_num_seqs: int,
    with_adapter: Collection[int] = (),
) -> int:
    """Return the index of the replica for a prompt.

    Replicas with the prompt's LoRA adapter come first, then the ones with the most blocks of the prompt (at least
    half), then the ones with the lowest load. Such a preference holds only while the replica's load is at most twice
    the lowest and below `max_num_seqs`, or at most `HEADROOM` above the lowest. Ties go to the first replica from
    `home` on, so that all frontends choose the same replica.

    Args:
        loads: Number of sequences at each replica.
        num_cached: Number of the prompt's leading blocks at each replica that has any of them.
        num_blocks: Number of full blocks of the prompt.
        home: Preferred replica for ties, modulo the number of replicas.
        max_num_seqs: Sequences that a replica runs at once.
        with_adapter: The replicas that have the adapter; empty for the base model.
    """
    least = min(loads)
    bound = highest_load(least, max_num_seqs)
    count = len(loads)

    def preference(index: int) -> tuple[bool, int, int, int, int]:
        found = num_cached.get(index, 0)
        worth_a_wait = found if 2 * found >= num_blocks else 0
        has_none = index not in with_adapter
        return has_none, -worth_a_wait, loads[index], -found, (index - home) % count

    # All others have nothing and a load that is not lower, so this one is preferred over them.
    nearest = _find(loads, least, home % count)
    special = (index for index in {*num_cached, *with_adapter} if loads[index] <= bound)
    return min((nearest, *special), key=preference)


def _find(loads: Sequence[int], load: int, start: int) -> int:
    """Return the first replica with a load, from `start` on and around."""
    try:
        return loads.index(load, start)
    except ValueError:
        return loads.index(load)
