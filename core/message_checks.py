"""Check the content of decoded messages before they are applied.

The decoder checks types, but neither the content of arrays, which are raw bytes, nor the range of numbers. A message
that fails a check is dropped, since no process of this engine sends such messages. A message with invalid requests is
an exception: its valid requests run, and the others are refused. If the output of the oldest step in flight is invalid,
the replica fails.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

import numpy as np

from ..protocol.arrays import int32_view
from ..protocol.block_hash import HASH_BYTES
from ..protocol.config import PROTOCOL_VERSION, EngineConfig
from ..protocol.encoder_inputs.inputs import EncoderGrid, EncoderInput
from ..protocol.errors import ParameterError
from ..protocol.messages import (
    AbortRequests,
    AppendInputs,
    ClientHello,
    ClientMessage,
    EngineCoreRequest,
)
from ..protocol.worker_messages import (
    DraftTokenIds,
    HeldRequest,
    KVConnectorOutput,
    ModelRunnerOutput,
    RowLogprobs,
    RowVector,
)

_MAX_INT32: Final = 2**31 - 1
_MAX_TIME: Final = 1 << 24
_UINT32: Final = np.dtype("<u4")

_FEW_BYTES: Final = 1024
"""Number of bytes up to which Python integers are faster than numpy, whose code is usually not in the CPU caches."""


def is_valid_hello(identity: bytes, hello: ClientHello, config: EngineConfig) -> bool:
    """Return whether a frontend's answer has its own identity and the greeting's version and epoch."""
    return (
        (hello.version, hello.epoch) == (PROTOCOL_VERSION, config.epoch)
        and 0 <= hello.client_index < config.parallel.api_server_count
        and identity == b"client%d" % hello.client_index
    )


def is_valid_message(message: ClientMessage) -> bool:
    """Return whether a client's message can be applied, except for its requests (see `split_requests`)."""
    if isinstance(message, AppendInputs):
        is_valid_index = 0 <= message.request_index <= _MAX_INT32
        return is_valid_index and _are_valid_inputs(message.inputs, 0)
    if isinstance(message, AbortRequests):
        return len(message.request_indices) % 4 == 0
    return True


def split_requests(
    requests: list[EngineCoreRequest], vocab_size: int
) -> tuple[list[EngineCoreRequest], list[int]]:
    """Return the valid requests, and the indices of the others, except those that no client uses."""
    invalid = [request for request in requests if not is_valid_request(request, vocab_size)]
    if not invalid:
        return requests, []
    valid = [request for request in requests if is_valid_request(request, vocab_size)]
    indices = (request.request_index for request in invalid)
    return valid, [index for index in indices if 0 <= index <= _MAX_INT32]


def is_valid_request(request: EngineCoreRequest, vocab_size: int) -> bool:
    """Return whether every number of the request is in range."""
    if not (
        0 <= request.request_index <= _MAX_INT32
        and -1 <= request.was_index <= _MAX_INT32
        and -_MAX_INT32 - 1 <= request.priority <= _MAX_INT32
        and math.isfinite(request.arrival_time)
        and math.isfinite(request.deadline)
        and are_below(vocab_size, request.prompt_token_ids)
        and are_below(vocab_size, request.output_token_ids)
        and are_below(vocab_size, request.predicted_token_ids)
        and len(request.delivery_times) % 4 == 0
        and (request.pooling_params is None or request.sampling_params.max_tokens == 1)
        and (
            request.pooling_params is None
            or (
                0 <= request.pooling_params.second_segment <= len(request.prompt_token_ids) // 4
                and 0 <= request.pooling_params.num_visible <= len(request.prompt_token_ids) // 4
            )
        )
        and all(0 <= token_id < vocab_size for token_id in request.eos_token_ids)
        and (request.lora is None or len(request.lora.version) == HASH_BYTES)
        and (
            not request.encoder_inputs
            or _are_valid_inputs(request.encoder_inputs, len(request.prompt_token_ids) // 4)
        )
    ):
        return False
    params = request.sampling_params
    try:
        # The decoder has checked the types.
        params.verify_numbers(vocab_size=vocab_size, max_logprobs=-1)
        params.verify_lists(vocab_size=vocab_size)
    except ParameterError:
        return False
    return True


def _are_valid_inputs(inputs: Iterable[EncoderInput], num_prompt_tokens: int) -> bool:
    """Return whether every number of the inputs is in range."""
    return all(
        0 <= item.position <= _MAX_INT32
        and 0 <= item.num_tokens <= _MAX_INT32
        and 0 <= item.size <= _MAX_INT32
        and 0 <= item.first <= item.size
        and 0 <= item.read_until <= _MAX_INT32
        and (item.grid is None or _is_valid_grid(item.grid, item.num_tokens))
        and _are_valid_places(item, num_prompt_tokens)
        for item in inputs
    )


def is_valid_output(output: ModelRunnerOutput, vocab_size: int, max_num_seqs: int) -> bool:
    """Return whether every array of the output has a valid length and only valid tokens and slots."""
    if not (
        are_below(vocab_size, output.sampled_token_ids)
        and len(output.num_sampled) % 4 == len(output.num_verified) % 4 == 0
        and are_below(max_num_seqs, output.nan_slots)
        and len(output.prediction_counts) % 12 == 0
        and are_below(_MAX_INT32, output.prediction_counts)
        and all(_is_valid_vector(row, max_num_seqs) for row in output.pooled)
        and (output.drafts is None or are_valid_drafts(output.drafts, vocab_size, max_num_seqs))
        and 0 <= output.seconds < math.inf
        and 0 <= output.draft_seconds < math.inf
        and 0 <= output.draft_passes <= _MAX_INT32
    ):
        return False
    if output.logprobs or output.prompt_logprobs:
        rows: Iterable[RowLogprobs] = (*output.logprobs, *output.prompt_logprobs)
        if not all(_is_valid_row(row, vocab_size) for row in rows):
            return False
    connector = output.kv_connector_output
    return connector is None or is_valid_connector_output(connector)


def is_valid_connector_output(output: KVConnectorOutput) -> bool:
    """Return whether the array of the report has a valid length."""
    return len(output.invalid_block_ids) % 4 == 0


def are_valid_drafts(drafts: DraftTokenIds, vocab_size: int, max_num_seqs: int) -> bool:
    """Return whether the arrays have matching lengths and contain only valid tokens and slots."""
    if not (
        are_below(max_num_seqs, drafts.slots)
        and are_below(vocab_size, drafts.token_ids)
        and len(drafts.num_tokens) == len(drafts.slots)
        and are_below(_MAX_INT32, drafts.levels)
        and len(drafts.levels) in (0, len(drafts.slots))
    ):
        return False
    num_tokens = int(np.frombuffer(drafts.num_tokens, _UINT32).sum(dtype=np.uint64))
    return num_tokens == len(drafts.token_ids) // 4


def is_valid_held_request(
    held: HeldRequest, num_blocks: int, num_groups: int, block_size: int
) -> bool:
    """Return whether every group has an entry, possibly the null block, for each block of computed tokens."""
    num_held = -(-held.num_computed_tokens // block_size)
    return (
        num_held >= 0
        and len(held.block_ids) == num_groups
        and all(
            len(block_ids) == 4 * num_held and are_below(num_blocks, block_ids)
            for block_ids in held.block_ids
        )
    )


def are_below(limit: int, array: bytes) -> bool:
    """Return whether all int32 numbers in `array` are in [0, limit)."""
    if not array:
        return True
    if len(array) % 4:
        return False
    if len(array) <= _FEW_BYTES:
        # One addition sets the highest bit of every number that is too large. In negative numbers it is set already.
        numbers = int.from_bytes(array, "little")
        addend, highest_bits = _for_every_number(len(array) // 4, 2**31 - limit, 2**31)
        return not (numbers | numbers + addend) & highest_bits
    # Interpreted as unsigned, negative numbers exceed all others.
    return int(np.frombuffer(array, _UINT32).max()) < limit


@lru_cache(maxsize=16)
def _for_every_number(count: int, *numbers: int) -> list[int]:
    """Return for each number an integer that repeats its 32 bits `count` times."""
    return [int.from_bytes(number.to_bytes(4, "little") * count, "little") for number in numbers]


def _is_valid_grid(grid: EncoderGrid, num_tokens: int) -> bool:
    return (
        grid.rows > 0
        and grid.columns > 0
        and 0 <= grid.margin <= num_tokens
        and grid.num_tokens == num_tokens
        and 0 <= grid.time < _MAX_TIME
    )


def _are_valid_places(item: EncoderInput, num_tokens: int) -> bool:
    if not item.places:
        return True
    if len(item.places) % 12:
        return False
    end, values = item.position - 1 + len(item.places) // 12, int32_view(item.places)
    return (
        item.position > 0
        and item.position + item.num_tokens <= end <= num_tokens
        and int(values.min()) > -_MAX_TIME
        and int(values.max()) < _MAX_TIME
    )


def _is_valid_vector(row: RowVector, max_num_seqs: int) -> bool:
    # The result is empty if an encoder writes no tokens.
    return (
        0 <= row.slot < max_num_seqs and len(row.vector) % 4 == 0 and 0 <= row.first <= _MAX_INT32
    )


def _is_valid_row(row: RowLogprobs, vocab_size: int) -> bool:
    num_positions = row.num_positions
    num_entries = len(row.token_ids)
    return (
        num_positions > 0
        and len(row.ranks) == 4 * num_positions
        and num_entries > 0
        and num_entries % (4 * num_positions) == 0
        and len(row.logprobs) == num_entries
        and are_below(vocab_size, row.token_ids)
    )
