"""Preempt running requests at random, for tests of preemption."""

from __future__ import annotations

from hashlib import blake2b

from ...state.slots import SlotArray


def choose_injected_preemption(probability: float, step: int, slots: SlotArray) -> int | None:
    """Return one of the running `slots` with the given probability, else None.

    The choice depends only on a hash of the step number, so that a replay repeats it.
    """
    if not probability or not len(slots):
        return None
    digest = blake2b(step.to_bytes(8, "little"), digest_size=8).digest()
    chance = int.from_bytes(digest[:4], "little") / 2**32
    if chance >= probability:
        return None
    draw = int.from_bytes(digest[4:], "little")
    return int(slots[draw % len(slots)])
