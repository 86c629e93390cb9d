"""The input (`SequenceRequest`) and output (`Delta`) of one sequence, for callers of the engine client."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, Final, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ...protocol.encoder_inputs.inputs import EncoderInput
from ...protocol.file_identity import LoraAdapter
from ...protocol.pooling_params import PoolingParams
from ...protocol.sampling_params import MAX_SEED, SamplingParams
from .logprobs import PositionLogprobs

SEQUENCES_AT_ONCE: Final = 128
"""Number of a request's sequences that are processed before other tasks run; takes about 2 ms."""

UNLIMITED: Final = sys.maxsize
"""A token count that no sequence reaches."""
TOKENS_AT_ONCE: Final = 4096
"""Maximum tokens that a stream reads from one sequence at once."""

LOGPROBS_AT_ONCE: Final = 128
"""Maximum logprob entries that a stream reads from one sequence at once."""

is_accepted: ContextVar[bool] = ContextVar("is_accepted", default=False)
"""True in tasks that answer a request which arrived before the server began to shut down, and will be finished."""

TokenIds: TypeAlias = npt.NDArray[np.integer[Any]] | Iterable[int]


class SequenceRequest(msgspec.Struct):
    """One prompt with one set of sampling parameters.

    Attributes:
        prompt_token_ids: Token IDs, shape [T].
        params: Sampling parameters; `n` is not expanded.
        cache_salt: Cached prefixes are shared only by sequences with equal `cache_salt` and `cache_owner`.
        tenant: The tenant whose limits apply.
        deadline: CLOCK_MONOTONIC seconds; 0 for none.
        data_parallel_rank: The replica to use; None for any.
        trace_headers: The W3C trace context of the request.
        predicted_token_ids: Tokens that the output is expected to repeat, shape [T]; None without a prediction.
        pooling: The pooling of the prompt's hidden states; None to generate instead.
        lora: The LoRA adapter to use; None for the base model.
        encoder_inputs: Images, audio clips or embeddings that replace some tokens of the prompt.
        is_open: True if more encoder inputs follow, in `EngineClient.append_inputs`.
        kv_transfer_params: Parameters for the KV connector, which say what another engine computes for the request.
        request_id: The ID of this sequence alone; "" for that of the whole request.
        is_warm_up: True if the frontend sends it for itself, before it is ready. Metrics do not count it.
    """

    prompt_token_ids: TokenIds
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    cache_owner: bytes = b""
    tenant: str = ""
    deadline: float = 0.0
    data_parallel_rank: int | None = None
    trace_headers: dict[str, str] | None = None
    predicted_token_ids: npt.NDArray[np.int32] | None = None
    pooling: PoolingParams | None = None
    lora: LoraAdapter | None = None
    encoder_inputs: list[EncoderInput] = msgspec.field(default_factory=list)
    is_open: bool = False
    kv_transfer_params: dict[str, object] | None = None
    request_id: str = ""
    is_warm_up: bool = False


class Delta(msgspec.Struct, gc=False):
    """The new output of one sequence since the last read.

    Attributes:
        finish_reason: The reason why the sequence finished; None while it is unfinished.
        stop_reason: The stop string or stop token ID, "repetition_detected", or "deadline"; None for the
            end-of-sequence token.
        error: The error message; set if `finish_reason` is not "stop", "length", "repetition" or "abort".
        retry_after_s: Seconds after which a request that was rejected because of a full queue may be retried.
    """

    text: str
    token_ids: list[int]
    logprobs: Iterable[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    retry_after_s: float = 0.0


class FastStream(Protocol):
    """Writes the new output of one sequence without the reader of its group."""

    def encode(self) -> bytes:
        """Return new output encoded, which may be empty. Output that the group's reader must write stays unread."""

    def write(self, body: bytes) -> None:
        """Write encoded output, which may be empty. This raises nothing."""


def params_for_output(params: SamplingParams, j: int) -> SamplingParams:
    """Return the parameters of output `j`, with its own seed, so that outputs differ and are repeatable."""
    seed = None if params.seed == -1 else params.seed
    if seed is not None and j:
        seed += j
        if seed > MAX_SEED:
            seed -= 2 * (MAX_SEED + 1)
    return msgspec.structs.replace(params, n=1, seed=seed)
