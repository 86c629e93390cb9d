"""Run the sequences of one HTTP request: submit them, watch for a disconnect and collect the outputs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.types import Receive, Scope

from ...protocol.config import EngineConfig
from ...protocol.encoder_inputs.inputs import EncoderInput
from ...protocol.errors import NO_ADAPTER_MEMORY, POISON_REQUEST
from ...protocol.file_identity import LoraAdapter
from ...protocol.pooling_params import PoolingParams
from ...protocol.process import logged_request_id
from ...protocol.sampling_params import SamplingParams, StructuredOutput
from ..client.beam_search import BeamSearch, BeamSearchFailed, BeamSearchParams
from ..client.engine_client import (
    BeginRecording,
    Delta,
    EngineDead,
    EngineDraining,
    Overloaded,
    ReplicaUnavailable,
    RequestGroup,
    SequenceRequest,
)
from ..client.sequence_io import params_for_output
from ..http.errors import (
    APIError,
    bad_request,
    deadline_exceeded,
    internal_error,
    redact,
    renamer,
    renaming,
    too_many_requests,
    unavailable,
    wrong,
)
from ..http.request_headers import read_trace_headers
from .bodies.body import ClientDisconnected
from .control.replicas import parse_rank
from .inputs.transfer_params import transfer_params
from .prompts import verify_num_sequences
from .schema import GenerationRequest, PoolingFields, StreamOptions
from .serving import Serving

ADAPTER_RETRY_S: Final = 10.0
"""Seconds after which a client may retry a request for whose adapter too little memory was free."""

MAX_USER_CHARACTERS: Final = 256
"""Maximum length of a request's `user`."""

MAX_STREAMED_LOGPROBS: Final = 1 << 11
"""Maximum log-probabilities per streamed token, because the event loop encodes them in one call."""

SEQUENCES_AT_ONCE: Final = 512
"""Sequences of a request that are created before other tasks run; takes about 2 ms."""

_NOT_IN_BEAM_SEARCH: Final = (
    "stream",
    "best_of",
    "logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "stop",
    "stop_regex",
    "stop_token_ids",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "prediction",
    "repetition_detection",
)
"""Fields that a beam search cannot support, because it compares the model's own log-probabilities."""

RANK_HEADER: Final = "X-data-parallel-rank"
_RANK_HEADER = RANK_HEADER.lower().encode()

REQUEST_ID: Final = re.compile(r"[!-~]{1,128}", re.ASCII)
"""Pattern of the IDs that clients may choose for their requests."""


class HasUser(Protocol):
    """A request with an optional `user`."""

    user: str | None


class Origin(NamedTuple):
    """The properties of a request that come from its client and its headers.

    Attributes:
        tenant: The tenant whose limits apply.
        cache_owner: The owner of the cached prefixes that it may share.
        deadline: The time at which the request ends, in CLOCK_MONOTONIC seconds; 0.0 for never.
        data_parallel_rank: The replica that computes it; None for any.
        trace_headers: The headers of its trace.
    """

    tenant: str = ""
    cache_owner: bytes = b""
    deadline: float = 0.0
    data_parallel_rank: int | None = None
    trace_headers: dict[str, str] | None = None


class PreparedPrompt(msgspec.Struct):
    """A prompt with verified parameters; `text` is None if the request gave token ids.

    `predicted_token_ids` is the client's prediction of the output; None without one. With `pooling`, no tokens are
    generated. `encoder_inputs` are images, audio clips or embeddings that replace some tokens; the content hashes of
    those that are parts of videos are `video_hashes`. `request_id` is "" if the prompt has none of its own.
    `after_reasoning` is the constraint on the text after a reasoning that the client may end; None if it may not.
    `lora` and `cache_salt` replace those of the request.
    """

    token_ids: npt.NDArray[np.int32]
    params: SamplingParams
    text: str | None = None
    predicted_token_ids: npt.NDArray[np.int32] | None = None
    pooling: PoolingParams | None = None
    encoder_inputs: list[EncoderInput] = msgspec.field(default_factory=list)
    request_id: str = ""
    after_reasoning: StructuredOutput | None = None
    video_hashes: frozenset[bytes] = frozenset()
    lora: LoraAdapter | None = None
    cache_salt: str | None = None

    @property
    def num_image_bytes(self) -> int:
        """The size of the preprocessed images in bytes."""
        return sum(len(item.data) for item in self.encoder_inputs)


def verify_streaming(request: GenerationRequest) -> None:
    """Verify the fields that depend on whether the response is streamed.

    Raises:
        APIError: `prompt_logprobs` with a stream, or `stream_options` without one (400).
    """
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs", "cannot be streamed; send stream=false")
    for name, other in (
        ("return_prompt_token_ids", "use return_token_ids"),
        ("return_meta_info", "send stream=false"),
    ):
        if getattr(request, name, None) and request.stream:
            raise bad_request(name, f"cannot be streamed; {other}")
    if request.stream_options not in (None, StreamOptions()) and not request.stream:
        raise bad_request("stream_options", "is only allowed with stream=true")


def beam_search_params(
    request: GenerationRequest, prompts: list[PreparedPrompt], config: EngineConfig
) -> BeamSearchParams | None:
    """Return the parameters of a beam search, or None if the request does not ask for one.

    Raises:
        APIError: A field is not supported in a beam search, or has no meaning without one (400).
    """
    if not request.use_beam_search:
        if request.length_penalty not in (None, 1.0):
            raise bad_request("length_penalty", "needs use_beam_search=true")
        return None
    params = prompts[0].params
    for name in _NOT_IN_BEAM_SEARCH:
        if getattr(request, name, None):
            raise bad_request(name, "is not supported with use_beam_search; leave out one of them")
    if params.structured_output is not None or params.logprobs is not None:
        name = "structured_outputs" if params.logprobs is None else "logprobs"
        raise bad_request(name, "is not supported with use_beam_search; leave out one of them")
    max_tokens = min(each.params.max_tokens or 1 for each in prompts)
    penalty = 1.0 if request.length_penalty is None else request.length_penalty
    search = BeamSearchParams(params.n, max_tokens, params.ignore_eos, penalty)
    with renaming(renamer({"beam_width": "n"})):
        search.verify(config)
    return search


def verify_streamed_logprobs(
    request: GenerationRequest, prompts: list[PreparedPrompt], serving: Serving
) -> None:
    """Verify that each token of the stream has few enough log-probabilities.

    Raises:
        APIError: A token may have more than `MAX_STREAMED_LOGPROBS` (400).
    """
    params = prompts[0].params
    if not request.stream or params.logprobs is None:
        return
    num_top = serving.config.model.vocab_size if params.logprobs == -1 else params.logprobs
    num_entries = 1 + num_top + len(params.logprob_token_ids)
    if num_entries > MAX_STREAMED_LOGPROBS:
        raise APIError(
            400,
            f"{num_entries} log-probabilities per token are too many for a stream; at "
            f"most {MAX_STREAMED_LOGPROBS} are allowed; use stream=false or request fewer",
            param="logprobs",
        )


def find_origin(scope: Scope, request: HasUser, deadline: float, num_replicas: int) -> Origin:
    """Return the origin of a request with this deadline.

    Raises:
        APIError: `user` is too long, or the replica is invalid (400).
    """
    state = scope["state"]
    return Origin(
        _find_tenant(request, state["tenant"]),
        state["cache_owner"],
        deadline,
        _find_data_parallel_rank(scope, request, num_replicas),
        read_trace_headers(scope),
    )


def _find_tenant(request: HasUser, key_tenant: str) -> str:
    """Return the tenant whose limits apply: the tenant of the API key, else the request's `user`."""
    user = request.user or ""
    if len(user) > MAX_USER_CHARACTERS:
        raise bad_request(
            "user", f"must have at most {MAX_USER_CHARACTERS} characters, got {len(user)}"
        )
    return key_tenant or user


def find_request_id(request: GenerationRequest | PoolingFields, state: dict[str, Any]) -> str:
    """Return the ID of a request. If the client chose it in the body, it also replaces the ID in the state.

    A header with an ID has priority over `request_id`, because gateways set it, as in vLLM, but not over `rid`.

    Raises:
        APIError: The ID is not allowed, or there are several (400).
    """
    rid = request.rid[0] if isinstance(request.rid, list) and len(request.rid) == 1 else request.rid
    param, chosen = ("request_id", request.request_id) if rid is None else ("rid", rid)
    if chosen is not None:
        if not isinstance(chosen, str) or not REQUEST_ID.fullmatch(chosen):
            raise wrong(param, "one ID of 1 to 128 visible ASCII characters", chosen)
        if param == "request_id" and state.get("has_given_id"):
            chosen = state["request_id"]
        state.update(request_id=chosen, has_given_id=True)
        logged_request_id.set(chosen)
    found: str = state["request_id"]
    return found


def _find_data_parallel_rank(scope: Scope, request: HasUser, num_replicas: int) -> int | None:
    """Return the replica that the client selects in the body or a header; None for any replica."""
    if isinstance(request, GenerationRequest) and request.data_parallel_rank is not None:
        param = request.sent_name("data_parallel_rank")
        return parse_rank(str(request.data_parallel_rank), param, num_replicas)
    for name, value in scope["headers"]:
        if name == _RANK_HEADER:
            return parse_rank(value.decode("latin-1").strip(), RANK_HEADER, num_replicas)
    return None


def verify_priority(priority: int | None) -> int:
    """Return the priority of a request, by default 0. Raise APIError 400 if it is too large."""
    if priority is not None and not -(2**31) <= priority < 2**31:
        raise bad_request("priority", f"must fit in 32 bits, got {priority}")
    return priority or 0


def verify_image(serving: Serving, inputs: Sequence[EncoderInput]) -> None:
    """Raise APIError (400) if a prompt needs an image and has no encoder input."""
    images = serving.config.model.images
    if images is not None and images.is_required and not inputs:
        raise APIError(400, "the model needs an image in each prompt; add one")


async def submit(
    serving: Serving,
    request: GenerationRequest | PoolingFields,
    prompts: list[PreparedPrompt],
    request_id: str,
    origin: Origin,
    *,
    search: BeamSearch | None = None,
    seeds: Sequence[int] = (),
    begin_recording: BeginRecording | None = None,
) -> RequestGroup:
    """Submit every output of every prompt; sequence `i * n + j` is output j of prompt i.

    With a `search`, wait for its results. `seeds`, if given, are the seeds of the sequences.

    Raises:
        APIError: The request has too many sequences (400), or the engine cannot accept them now (503).
        ParameterError: A parameter is invalid.
    """
    sequences = await sequence_requests(
        serving, request, prompts, origin, is_search=search is not None
    )
    for sequence, seed in zip(sequences, seeds, strict=False):
        sequence.params = msgspec.structs.replace(sequence.params, seed=seed)
    with translate_refusals(serving):
        if search is None:
            group = await serving.engine.submit(
                sequences, request_id=request_id, begin_recording=begin_recording
            )
            if isinstance(request, GenerationRequest) and request.stream_interval is not None:
                for each in group.sequences:
                    each.stream_interval = max(each.stream_interval, request.stream_interval)
            return group
        try:
            return await search.run(sequences)
        except BeamSearchFailed as error:
            raise_if_failed(error.output)
            raise


async def sequence_requests(
    serving: Serving,
    request: GenerationRequest | PoolingFields,
    prompts: list[PreparedPrompt],
    origin: Origin,
    *,
    is_search: bool = False,
) -> list[SequenceRequest]:
    """Return one sequence request per output of each prompt; for a beam search, one per prompt.

    Raises:
        APIError: The request has too many sequences, or an invalid priority (400); there is no such model (404).
    """
    n = prompts[0].params.n
    verify_num_sequences(len(prompts) * n)
    priority = verify_priority(request.priority)
    scales = request.lora if isinstance(request, GenerationRequest) else None
    lora = serving.find_lora(request.model, scales)
    transfer = transfer_params(getattr(request, "kv_transfer_params", None), serving.config)
    states = prompts[0].params.returned_states
    if (transfer or (states and states.path)) and len(prompts) * n > 1:
        raise bad_request("kv_transfer_params", "needs one prompt and n=1")
    if request.cache_salt == "":
        # A client that computes salts would otherwise share its cache with everybody.
        name = "cache_salt"
        if isinstance(request, GenerationRequest):
            name = request.sent_name(name)
        raise bad_request(name, "must not be empty; omit it to share the cache")
    sequences: list[SequenceRequest] = []
    for prompt in prompts:
        verify_image(serving, prompt.encoder_inputs)
        num_before = len(sequences)
        chosen = prompt.lora or lora
        sequences += (
            SequenceRequest(
                prompt_token_ids=prompt.token_ids,
                params=params_for_output(prompt.params, j),
                priority=priority,
                cache_salt=prompt.cache_salt or request.cache_salt,
                cache_owner=origin.cache_owner,
                tenant=origin.tenant,
                deadline=origin.deadline,
                data_parallel_rank=origin.data_parallel_rank,
                trace_headers=origin.trace_headers,
                predicted_token_ids=prompt.predicted_token_ids,
                pooling=prompt.pooling,
                lora=chosen or (serving.config.model.media_lora if prompt.encoder_inputs else None),
                encoder_inputs=prompt.encoder_inputs,
                kv_transfer_params=transfer,
                request_id=prompt.request_id,
            )
            for j in range(1 if is_search else n)
        )
        if len(sequences) // SEQUENCES_AT_ONCE > num_before // SEQUENCES_AT_ONCE:
            await asyncio.sleep(0)
    return sequences


@contextmanager
def translate_refusals(serving: Serving) -> Iterator[None]:
    """Turn the engine's refusals of a request within this context into APIError 503."""
    try:
        yield
    except Overloaded as error:
        raise unavailable(str(error), error.retry_after_s) from None
    except ReplicaUnavailable as error:
        raise unavailable(f"{error}; leave out {RANK_HEADER}", serving.retry_after_s) from None
    except EngineDraining as error:
        raise unavailable(str(error), serving.retry_after_s) from None
    except EngineDead as error:
        raise unavailable(redact(str(error)), serving.retry_after_s) from None


class ClientWatch:
    """A context that calls `group.leave` as soon as the client disconnects, and in any case on exit.

    When the client disconnects, `on_disconnect` is called as well.
    """

    def __init__(
        self,
        receive: Receive,
        group: RequestGroup | BeamSearch,
        on_disconnect: Callable[[], None] = lambda: None,
    ) -> None:
        self._receive = receive
        self._group = group
        self._on_disconnect = on_disconnect
        self.disconnected = False

    def __enter__(self) -> ClientWatch:
        self._task = asyncio.create_task(self._watch())
        return self

    def __exit__(self, *exc: object) -> None:
        self._task.cancel()
        # The canceled task keeps this object, and with it all objects of the request until a garbage collection.
        del self._task
        self._group.leave()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True
        self._group.leave()
        self._on_disconnect()


async def wait_for_end(group: RequestGroup, receive: Receive) -> None:
    """Wait until every sequence has finished. Raise ClientDisconnected if the client closed the connection first."""
    with ClientWatch(receive, group) as watch:
        await group.wait_for_end()
        if watch.disconnected:
            raise ClientDisconnected


def read_outputs(group: RequestGroup, *, shows_abort: bool = False) -> list[Delta]:
    """Return the complete output of every sequence.

    With `shows_abort`, an aborted sequence has not failed.

    Raises:
        APIError: A sequence failed.
    """
    outputs = group.read_all()
    for output in outputs:
        raise_if_failed(output, shows_abort=shows_abort)
    return outputs


def raise_if_failed(delta: Delta, *, shows_abort: bool = False) -> None:
    """Raise APIError if the engine ended this sequence without finishing it.

    With `shows_abort`, an aborted sequence has not failed.
    """
    reason = delta.finish_reason
    if reason in (None, "stop", "length", "repetition") or (shows_abort and reason == "abort"):
        return
    message = redact(delta.error or f"The request failed before it finished: {reason}")
    if reason == "ignored" and message.startswith(NO_ADAPTER_MEMORY):
        raise unavailable(message, delta.retry_after_s or ADAPTER_RETRY_S)
    if reason == "ignored":
        raise APIError(400, message)
    if reason == "rejected":
        raise unavailable(message, delta.retry_after_s)
    if reason == "throttled":
        raise too_many_requests(message, delta.retry_after_s)
    if reason == "expired":
        raise deadline_exceeded(message, delta.retry_after_s)
    raise internal_error(message, may_retry=delta.error != POISON_REQUEST)


def matched_stop(delta: Delta) -> int | str | None:
    """Return the stop string or token that ended an output, or the end-of-sequence token; None for other ends."""
    if delta.finish_reason == "stop" and delta.stop_reason is None and delta.token_ids:
        return delta.token_ids[-1]
    return delta.stop_reason if delta.finish_reason == "stop" else None
