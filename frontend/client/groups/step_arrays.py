"""Read the arrays of a message with the outputs of a step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, repeat
from typing import TypeVar

from ....protocol.arrays import float32_view, int32_list
from ....protocol.messages import F32, EngineCoreOutputs

T = TypeVar("T")


def token_ids_of(outputs: EngineCoreOutputs, num_rows: int) -> list[int]:
    """Return the tokens of all rows. Raise ValueError if their number does not match the rows."""
    token_ids = int32_list(outputs.token_ids)
    if not outputs.num_tokens:
        if len(token_ids) != num_rows:
            raise ValueError(f"{len(token_ids)} tokens for {num_rows} requests")
        return token_ids
    counts = int32_list(outputs.num_tokens)
    if len(counts) != num_rows or min(counts) < 0 or sum(counts) != len(token_ids):
        raise ValueError(f"counts of {len(token_ids)} tokens do not match {num_rows} requests")
    return token_ids


def times_of(data: F32, num_ended: int) -> list[float]:
    """Return the seconds of each finished request. Raise ValueError if their number does not match."""
    seconds: list[float] = float32_view(data).tolist() if data else []
    if seconds and len(seconds) != num_ended:
        raise ValueError(f"{len(seconds)} times for {num_ended} finished requests")
    return seconds


def owners_of(outputs: EngineCoreOutputs, rows: list[T]) -> Iterable[T]:
    """Return an iterable with the row of each token in the message."""
    if not outputs.num_tokens:
        return rows
    return chain.from_iterable(map(repeat, rows, int32_list(outputs.num_tokens)))
