"""Log-probabilities as the API reports them, decoded from the wire only when they are read."""

from __future__ import annotations

import msgspec

from ..protocol.arrays import float32_view, int32_view
from ..protocol.messages import TokenLogprobs


class PositionLogprobs(msgspec.Struct, gc=False):
    """One position: the token that was taken, its 1-based rank, and the likeliest alternatives.

    `top` holds (token id, logprob) pairs, likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


def decode_logprobs(messages: list[TokenLogprobs]) -> list[PositionLogprobs]:
    """The positions of consecutive messages of one request, in order.

    Raises ValueError when an array does not have `num_positions` rows.
    """
    positions = []
    for message in messages:
        shape = (message.num_positions, -1)
        token_ids = int32_view(message.token_ids).reshape(shape).tolist()
        logprobs = float32_view(message.logprobs).reshape(shape).tolist()
        ranks = int32_view(message.ranks).tolist()
        for ids, values, rank in zip(token_ids, logprobs, ranks, strict=True):
            top = list(zip(ids[1:], values[1:], strict=True))
            positions.append(PositionLogprobs(ids[0], values[0], rank, top))
    return positions
