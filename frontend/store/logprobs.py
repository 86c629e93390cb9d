"""Operations on lists of log-probability messages, each of which is about consecutive tokens of one stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from ...protocol.messages import TokenLogprobs
from ...protocol.sampling_params import MAX_LOGPROB_TOKEN_IDS, SamplingParams

MAX_RECORDED_LOGPROBS: Final = 20 + MAX_LOGPROB_TOKEN_IDS
"""Maximum log-probabilities per token of a recorded request: as many as OpenAI's API allows, and listed tokens."""
_MAX_ROW_BYTES: Final = 4 * (1 + MAX_RECORDED_LOGPROBS)


def cut_logprobs(messages: list[TokenLogprobs], num_positions: int) -> None:
    """Delete the log-probabilities after the first `num_positions` positions."""
    extra = sum(message.num_positions for message in messages) - num_positions
    while extra > 0:
        last = messages.pop()
        extra -= last.num_positions
        if extra < 0:
            messages.append(_slice(last, 0, -extra))


def last_logprobs(messages: Sequence[TokenLogprobs], num_positions: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of the last `num_positions` positions, in time proportional to their number."""
    found: list[TokenLogprobs] = []
    missing = num_positions
    for message in reversed(messages):
        if missing <= 0:
            break
        missing -= message.num_positions
        found.append(message if missing >= 0 else _slice(message, -missing, message.num_positions))
    found.reverse()
    return found


def take_logprobs(messages: list[TokenLogprobs], num_positions: int) -> list[TokenLogprobs]:
    """Remove the log-probabilities of the first `num_positions` positions, and return them."""
    taken: list[TokenLogprobs] = []
    missing = num_positions
    while missing > 0 and len(taken) < len(messages):
        message = messages[len(taken)]
        taken.append(message if message.num_positions <= missing else _slice(message, 0, missing))
        missing -= message.num_positions
    rest = (
        [_slice(message, message.num_positions + missing, message.num_positions)]
        if missing < 0
        else []
    )
    messages[: len(taken)] = rest
    return taken


def is_recordable(params: SamplingParams) -> bool:
    """Return whether a request asks for few enough log-probabilities to be recorded, and for no hidden states."""
    if params.returned_states is not None:
        return False
    wanted = (
        (params.logprobs or 0, params.logprob_token_ids),
        (params.prompt_logprobs or 0, params.prompt_logprob_token_ids),
    )
    return all(0 <= num <= MAX_RECORDED_LOGPROBS - len(listed) for num, listed in wanted)


def select_recordable(messages: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
    """Return the messages that have few enough log-probabilities to be recorded."""
    return [m for m in messages if len(m.token_ids) <= _MAX_ROW_BYTES * m.num_positions]


def size_of_logprobs(messages: Sequence[TokenLogprobs]) -> int:
    """Return the size of messages in bytes."""
    return sum(len(m.token_ids) + len(m.logprobs) + len(m.ranks) for m in messages)


def _slice(message: TokenLogprobs, start: int, end: int) -> TokenLogprobs:
    row = len(message.token_ids) // message.num_positions
    return msgspec.structs.replace(
        message,
        num_positions=end - start,
        token_ids=message.token_ids[row * start : row * end],
        logprobs=message.logprobs[row * start : row * end],
        ranks=message.ranks[4 * start : 4 * end],
    )
