"""A request in the scheduler: its identity, and the state that it keeps while it has no slot.

State that changes in every step is in the arrays of `Slots`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from typing import Final, TypeAlias

import numpy as np

from ...protocol.arrays import Int32Array, int32_view
from ...protocol.block_hash import HASH_BYTES, PlacedInput
from ...protocol.encoder_inputs.inputs import EncoderInput
from ...protocol.messages import EngineCoreRequest, TokenLogprobs
from ...protocol.sampling_params import StatesOf

RequestKey: TypeAlias = tuple[int, int]
"""(client_index, request_index): unique among live requests."""


_FEW_BYTES = 16 * HASH_BYTES
_UNPACK = [Struct(f"{HASH_BYTES}s" * count).unpack for count in range(17)]
_DIGEST = np.dtype((np.void, HASH_BYTES))

TOKENS_PER_EMBEDDING: Final = 1 << 12
"""Number of tokens whose int32 ids take as many bytes as the pixels behind one embedding can take at most."""


class RequestStatus(enum.IntEnum):
    """The status of a request. FINISHED_STOPPED and all later ones are final, in the order of `FinishReason`."""

    WAITING = 0
    WAITING_FOR_GRAMMAR = 1
    WAITING_FOR_REMOTE_KVS = 2
    RUNNING = 3
    PREEMPTED = 4
    PREEMPTED_IN_FLIGHT = 5
    """Preempted; it returns to the queue when its tokens in flight have arrived."""
    WAITING_FOR_INPUT = 6
    FINISHED_STOPPED = 7
    FINISHED_LENGTH = 8
    FINISHED_ABORTED = 9
    FINISHED_IGNORED = 10
    FINISHED_EXPIRED = 11
    FINISHED_ERROR = 12
    FINISHED_REJECTED = 13
    FINISHED_THROTTLED = 14
    FINISHED_MOVED = 15


FINISHED: Final = tuple(RequestStatus)[RequestStatus.FINISHED_STOPPED :]
"""The final status for each `FinishReason`."""

# Constants, because looking up an enum member takes as long as creating an object.
WAITING: Final = RequestStatus.WAITING
RUNNING: Final = RequestStatus.RUNNING


class RequestConstants:
    """The fields of a request that are assigned only once, with an immutable value."""

    __slots__ = (
        "arrival",
        "arrival_time",
        "client_index",
        "deadline",
        "eos_token_ids",
        "first_inputs",
        "grows",
        "is_resubmitted",
        "is_warm_up",
        "key",
        "kv_transfer_params",
        "lora",
        "num_prompt_tokens",
        "params",
        "pooling_params",
        "predicted_token_ids",
        "priority",
        "prompt_block_hashes",
        "prompt_token_ids",
        "queued_at",
        "request_id",
        "request_index",
        "root_hash",
        "stop_token_ids",
        "tenant",
        "trace_headers",
    )


class Request(RequestConstants):
    """An unfinished request.

    Attributes:
        arrival: The number of the request, in the order in which requests arrived.
        rank: The policy's sort key, which takes precedence over `arrival`.
        slot: The slot, or -1. With a slot, the output tokens are in `Slots`; otherwise in `output_token_ids`.
        num_tokens: The number of prompt and output tokens, without a slot.
        num_cached_tokens: The number of tokens that the first admission found in the cache; -1 before.
        num_loaded_tokens: The part of them that a KV connector loaded while the request waited.
        num_held_tokens: The number of first tokens whose keys and values the blocks of a request hold at its end.
        num_shared_tokens: The number of first tokens of a prompt that earlier requests had too, if states are cached.
        num_reserved_tokens: The number of first tokens whose blocks are held while the request waits.
        num_charged_tokens: The number of first tokens for which the tenant has been charged.
        computes_locally: True if no more blocks are loaded for the request.
        has_untrusted_blocks: True if the request's blocks may have wrong contents and must not be cached.
        has_grammar: True once the grammar is compiled.
        awaits_mask: True while an isolated grammar computes the bitmask of the next token.
        encoder_inputs: The inputs that have arrived. `first_inputs` came with the request.
        has_all_inputs: True once the last input of a request that `grows` has arrived.
        max_tokens: The maximum number of output tokens, which the end of its inputs may reduce.
        is_untouched: True while the request waits as it arrived: every field has the value that `__init__` gives it,
            except that `block_hashes` may have been computed. Code that changes a field of a waiting request clears it.
    """

    __slots__ = (
        "_block_hashes",
        "awaits_mask",
        "computes_locally",
        "encoder_inputs",
        "has_all_inputs",
        "has_grammar",
        "has_sampled",
        "has_untrusted_blocks",
        "is_corrupted",
        "is_finished",
        "is_untouched",
        "max_tokens",
        "num_admissions",
        "num_cached_tokens",
        "num_charged_tokens",
        "num_held_tokens",
        "num_loaded_tokens",
        "num_reserved_tokens",
        "num_shared_tokens",
        "num_tokens",
        "output_token_ids",
        "prompt_logprobs",
        "rank",
        "slot",
        "status",
    )

    def __init__(
        self, client_index: int, message: EngineCoreRequest, arrival: int, queued_at: float
    ) -> None:
        self.client_index = client_index
        self.request_index = message.request_index
        self.request_id = message.request_id
        self.key: RequestKey = (client_index, message.request_index)
        self.arrival = arrival
        self.arrival_time = message.arrival_time
        self.queued_at = queued_at
        self.rank = 0.0
        self.priority = message.priority
        self.tenant = message.tenant
        self.deadline = message.deadline
        self.trace_headers = message.trace_headers
        self.encoder_inputs = self.first_inputs = message.encoder_inputs
        self.grows = message.is_open
        self.has_all_inputs = False
        self.lora = message.lora
        self.kv_transfer_params = message.kv_transfer_params
        self.params = message.sampling_params
        self.max_tokens = message.sampling_params.max_tokens
        self.pooling_params = message.pooling_params
        self.prompt_token_ids = message.prompt_token_ids
        self.num_prompt_tokens = len(message.prompt_token_ids) // 4
        self.output_token_ids = message.output_token_ids
        self.predicted_token_ids = message.predicted_token_ids
        self.num_tokens = self.num_prompt_tokens + len(message.output_token_ids) // 4
        self.prompt_block_hashes = message.block_hashes
        self.root_hash = message.root_hash
        self._block_hashes: list[bytes] | None = None
        ends = () if self.params.ignore_eos else message.eos_token_ids
        self.eos_token_ids = ends
        self.stop_token_ids = ends + self.params.stop_token_ids
        self.status = WAITING
        self.is_finished = False
        # A request with output is never treated as untouched, because its output moves into `Slots` and back.
        self.is_untouched = not message.output_token_ids
        self.is_resubmitted = message.is_resubmitted
        self.is_warm_up = message.is_warm_up
        self.slot = -1
        self.num_admissions = 0
        self.num_cached_tokens = -1
        self.num_loaded_tokens = 0
        self.num_held_tokens = 0
        self.has_grammar = False
        self.awaits_mask = False
        self.has_sampled = bool(message.output_token_ids)
        self.is_corrupted = False
        self.has_untrusted_blocks = False
        self.computes_locally = False
        self.num_reserved_tokens = self.num_shared_tokens = 0
        self.num_charged_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs] | None = None

    @property
    def transfer_id(self) -> int:
        """The unique id of the request for KV connectors."""
        return self.arrival

    @property
    def computes_whole_prompt(self) -> bool:
        """True if the result needs the hidden state of every token, so that no cached or loaded prefix may be used."""
        if self.pooling_params is not None:
            return self.pooling_params.computes_whole_prompt
        states = self.params.returned_states
        if states is not None and states.tokens is StatesOf.ALL:
            return True
        reads_prompt = self.params.prompt_logprobs is not None or (
            states is not None and states.tokens is StatesOf.PROMPT
        )
        return reads_prompt and not self.has_sampled

    @property
    def source_size(self) -> int:
        """The maximum number of encoder outputs that a token reads by cross attention."""
        return source_size(self.encoder_inputs)

    @property
    def is_open(self) -> bool:
        """True while more encoder inputs arrive."""
        return self.grows and not self.has_all_inputs

    @property
    def reads_inputs_in_output(self) -> bool:
        """True if encoder inputs follow the prompt, so that output tokens read them."""
        return self.is_open or self.num_ready_tokens > self.num_prompt_tokens

    @property
    def num_ready_tokens(self) -> int:
        """The position at which the encoder inputs end, up to which an open request may be computed."""
        inputs = self.encoder_inputs
        return inputs[-1].position + inputs[-1].num_tokens if inputs else 0

    @property
    def awaits_input(self) -> bool:
        """True if more inputs must arrive before a request without a slot can compute all of its tokens."""
        return self.is_open and self.num_ready_tokens < self.num_tokens

    @property
    def num_sent_tokens(self) -> int:
        """Number of tokens whose int32 ids take as many bytes as the request takes in a step message."""
        if not self.encoder_inputs:
            return self.num_tokens
        size = sum(item.size for item in self.encoder_inputs)
        return self.num_tokens + TOKENS_PER_EMBEDDING * size

    @property
    def token_ids(self) -> bytes:
        """Prompt and output as int32 bytes. Valid only while the request has no slot."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def block_hashes(self) -> list[bytes]:
        """Digests of the full blocks hashed so far, in order."""
        if self._block_hashes is None:
            self._block_hashes = _split(self.prompt_block_hashes)
        return self._block_hashes

    def block_hash(self, index: int) -> bytes | None:
        """Return the digest of a full block, or None if it is not hashed yet."""
        hashes = self.block_hashes
        return hashes[index] if index < len(hashes) else None

    def stops_at(self, token_id: int, num_output_tokens: int) -> bool:
        """Return whether the request stops if this is its output token number `num_output_tokens`, counted from 1.

        Before `min_tokens`, workers sample an end token only if the request's grammar allows nothing else.
        """
        params = self.params
        may_stop = num_output_tokens >= params.min_tokens or params.structured_output is not None
        return may_stop and token_id in self.stop_token_ids

    def hash_output_blocks(
        self,
        output_token_ids: Int32Array,
        block_size: int,
        hash_blocks: Callable[[Int32Array, int, bytes, Sequence[PlacedInput]], bytes],
    ) -> list[bytes]:
        """Extend `block_hashes` over all full blocks of the prompt followed by `output_token_ids`."""
        hashes = self.block_hashes
        if self.is_open:
            # The hash of a block covers the inputs of all of its tokens.
            output_token_ids = output_token_ids[: self.num_ready_tokens - self.num_prompt_tokens]
        start = len(hashes) * block_size
        end = self.num_prompt_tokens + len(output_token_ids)
        if end - start >= block_size:
            prompt = int32_view(self.prompt_token_ids)[start:]
            output = output_token_ids[max(0, start - self.num_prompt_tokens) :]
            parent = hashes[-1] if hashes else self.root_hash
            inputs = [
                (item.position - start, item.num_tokens, item.content_hash)
                for item in self.encoder_inputs
                if item.position + item.num_tokens >= start
            ]
            digests = hash_blocks(np.concatenate((prompt, output)), block_size, parent, inputs)
            hashes += _split(digests)
        return hashes


def _split(digests: bytes) -> list[bytes]:
    if len(digests) <= _FEW_BYTES:
        return list(_UNPACK[len(digests) // HASH_BYTES](digests))
    split: list[bytes] = np.frombuffer(digests, dtype=_DIGEST).tolist()
    return split


def source_size(inputs: Iterable[EncoderInput]) -> int:
    """Return the maximum number of embeddings that a token reads by cross attention."""
    longest = total = 0
    for item in inputs:
        total = item.size + (total if item.follows else 0)
        longest = max(longest, total)
    return longest
