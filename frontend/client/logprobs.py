"""Decode the logprobs in the cores' messages, lazily when they are read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

import msgspec

from ...protocol.arrays import float32_view, int32_list, int32_view
from ...protocol.messages import TokenLogprobs

ENTRIES_AT_ONCE: Final = 4096
"""Entries decoded in one call. Decoding blocks all other threads."""


class PositionLogprobs(msgspec.Struct, gc=False):
    """The logprobs of one position.

    Attributes:
        token_id: The sampled token.
        logprob: Its logprob.
        rank: Its rank, from 1.
        top: Pairs of token ID and logprob, the most likely first.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class Logprobs:
    """The logprobs of new tokens.

    Each iteration decodes the messages again, because a list would need much more memory.
    """

    __slots__ = ("_messages", "_num_positions")

    def __init__(self, messages: list[TokenLogprobs], num_positions: int) -> None:
        self._messages = messages
        self._num_positions = num_positions

    def __iter__(self) -> Iterator[PositionLogprobs]:
        return islice(iterate_logprobs(self._messages), self._num_positions)


def iterate_logprobs(messages: list[TokenLogprobs]) -> Iterator[PositionLogprobs]:
    """Yield the positions of consecutive messages of one request.

    Raises:
        ValueError: An array does not have `num_positions` rows.
    """
    for message in messages:
        if message.num_positions == 1:
            # Most messages to streams. Views take longer for so few numbers.
            [rank] = int32_list(message.ranks)
            values = float32_view(message.logprobs).tolist()
            yield _position(int32_list(message.token_ids), values, rank)
            continue
        shape = (message.num_positions, -1)
        all_ids = int32_view(message.token_ids).reshape(shape)
        all_logprobs = float32_view(message.logprobs).reshape(shape)
        ranks = int32_view(message.ranks).tolist()
        num_rows = max(1, ENTRIES_AT_ONCE // all_ids.shape[1])
        for start in range(0, len(all_ids), num_rows):
            rows = slice(start, start + num_rows)
            for ids, values, rank in zip(
                all_ids[rows].tolist(), all_logprobs[rows].tolist(), ranks[rows], strict=True
            ):
                yield _position(ids, values, rank)


def _position(ids: list[int], values: list[float], rank: int) -> PositionLogprobs:
    return PositionLogprobs(ids[0], values[0], rank, list(zip(ids[1:], values[1:], strict=True)))
