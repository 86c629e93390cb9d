"""Traces of requests to simulate: arrival times, lengths and shared prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import shake_128
from itertools import pairwise
from pathlib import Path

import msgspec

from ...protocol.arrays import int32_view
from ...protocol.block_hash import HASH_BYTES, root_hash
from ...protocol.errors import EngineError
from ...protocol.messages import EngineCoreRequest
from ...protocol.sampling_params import SamplingParams
from ..replay.dump import Dump
from ..replay.events import HASH_BLOCKS, AddRequest, Answer, Update
from ..replay.redaction import expand_request
from ..replay.replayer import Replayer
from ..replay.snapshot import expand_digests
from ..state.request import RequestKey


class TraceRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request to simulate. `arrival` is in seconds, `deadline` in seconds after the arrival.

    Requests with an equal `prefix` share their first `prefix_tokens` tokens. `block_hashes` are the recorded hashes of
    the prompt, and `output_hashes` those of the output that later prompts contain.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    priority: int = 0
    deadline: float = 0.0
    prefix: str = ""
    prefix_tokens: int = 0
    block_hashes: bytes = b""
    output_hashes: bytes = b""

    def message(self, index: int, block_size: int) -> EngineCoreRequest:
        """Return the request as a frontend would send it. The tokens are zeros; only the block hashes differ."""
        return EngineCoreRequest(
            request_index=index,
            prompt_token_ids=bytes(4 * self.prompt_tokens),
            sampling_params=SamplingParams(max_tokens=self.output_tokens, ignore_eos=True),
            arrival_time=self.arrival,
            block_hashes=self.hashes(index, block_size),
            root_hash=root_hash(),
            priority=self.priority,
            tenant=self.tenant,
            deadline=self.arrival + self.deadline if self.deadline else 0.0,
        )

    def hashes(self, index: int, block_size: int) -> bytes:
        """Return the hashes of the full blocks of the prompt; those of an equal prefix are equal."""
        if self.block_hashes:
            return self.block_hashes
        num_shared = self.prefix_tokens // block_size if self.prefix else 0
        num_shared = min(num_shared, self.prompt_tokens // block_size)
        num_own = self.prompt_tokens // block_size - num_shared
        # An extendable hash: a longer digest begins with the shorter ones.
        shared = shake_128(self.prefix.encode()).digest(HASH_BYTES * num_shared)
        return shared + shake_128(b"\0%d" % index).digest(HASH_BYTES * num_own)


def read_trace(path: str | Path) -> list[TraceRequest]:
    """Read a file with one JSON object per line, in any order. Arrivals are shifted to begin at 0.

    Raises:
        EngineError: The file cannot be read, or a line is invalid; the message names the line.
    """
    decode = msgspec.json.Decoder(TraceRequest).decode
    requests = []
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise EngineError(f"cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = decode(line)
        except msgspec.DecodeError as error:
            raise EngineError(f"{path}, line {number}: {error}") from error
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(request, name) < 1:
                raise EngineError(
                    f"{path}, line {number}: {name} must be at least 1, got {getattr(request, name)}"
                )
        requests.append(request)
    return _from_zero(requests)


def trace_from_dump(dump: Dump) -> list[TraceRequest]:
    """Return the requests that arrived in the log, each with as many output tokens as it generated there."""
    requests: dict[RequestKey, TraceRequest] = {}
    generated: dict[RequestKey, int] = {}
    done: list[tuple[TraceRequest, int]] = []
    for segment in dump.segments:
        if not segment.is_whole:
            continue
        replayer = Replayer(dump.setup, segment)
        for moment in replayer.run():
            event = moment.event
            if isinstance(event, AddRequest):
                key = event.client_index, event.message.request_index
                requests[key] = _trace_request(event)
                generated[key] = 0
            if not isinstance(event, Update):
                continue
            for client_index, message in (moment.outputs or {}).items():
                indices = int32_view(message.request_indices).tolist()
                counts = int32_view(message.num_tokens).tolist() or [1] * len(indices)
                for index, count in zip(indices, counts, strict=True):
                    if (client_index, index) in generated:
                        generated[client_index, index] += count
                for finished in int32_view(message.finished_set).tolist():
                    key = client_index, finished
                    if key in requests:
                        done.append((requests.pop(key), generated.pop(key)))
    done += [(request, generated[key]) for key, request in requests.items()]
    for request, num_tokens in done:
        request.output_tokens = num_tokens
    _find_outputs(dump, [request for request, _ in done])
    return _from_zero(request for request, num_tokens in done if num_tokens)


def _find_outputs(dump: Dump, requests: Sequence[TraceRequest]) -> None:
    """Set the hashes of the outputs with which prompts of the same conversation continue."""
    events = (event for segment in dump.segments for event in segment.events)
    generated = {
        digest
        for event in events
        if isinstance(event, Answer)
        and event.call == HASH_BLOCKS
        and isinstance(event.value, bytes)
        for digest in _split(expand_digests(event.value))
    }
    following = {
        first: second
        for request in requests
        for first, second in pairwise(_split(request.block_hashes))
        if second in generated
    }
    for request in requests:
        last = request.block_hashes[-HASH_BYTES:]
        while last := following.get(last, b""):
            request.output_hashes += last


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]


def _trace_request(event: AddRequest) -> TraceRequest:
    message = expand_request(event)
    return TraceRequest(
        arrival=message.arrival_time,
        prompt_tokens=event.num_prompt_bytes // 4,
        output_tokens=0,
        tenant=message.tenant,
        priority=message.priority,
        deadline=message.deadline - message.arrival_time if message.deadline else 0.0,
        block_hashes=message.block_hashes,
    )


def _from_zero(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Return the requests sorted by arrival, with the first arrival at 0."""
    ordered = sorted(requests, key=lambda request: request.arrival)
    if not ordered:
        raise EngineError("the trace has no request that generated a token")
    start = ordered[0].arrival
    for request in ordered:
        request.arrival -= start
    return ordered
