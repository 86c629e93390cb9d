"""The outputs of a scheduler for one client, and those it would have if its request ran alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256

from engine.protocol.arrays import int32_view
from engine.protocol.file_identity import LoraAdapter
from engine.protocol.messages import (
    EngineCoreRequest,
    EventKind,
    FinishedRequest,
    FinishReason,
    RequestEvent,
)
from support.scheduler.fingerprints import extend_at, fingerprints, places_of
from support.scheduler.model_grammar import allowed_tokens
from support.scheduler.model_worker import choose_token

Key = tuple[int, int]


@dataclass
class ClientView:
    """The outputs of one request that its client has received."""

    message: EngineCoreRequest
    token_ids: list[int] = field(default_factory=list)
    finished: FinishedRequest | None = None
    is_over: bool = False
    was_aborted: bool = False
    events: list[RequestEvent] = field(default_factory=list)
    num_accepted_predictions: int = 0
    num_rejected_predictions: int = 0

    @property
    def reason(self) -> FinishReason | None:
        return self.finished.reason if self.finished else None

    def num_events(self, kind: EventKind) -> int:
        return sum(event.kind == kind for event in self.events)


REFUSED = {FinishReason.IGNORED, FinishReason.REJECTED, FinishReason.THROTTLED}


def run_alone(
    message: EngineCoreRequest, *, max_total_tokens: int, vocab_size: int
) -> tuple[list[int], FinishReason, int | None]:
    """Return the output of a request run alone: tokens, finish reason, stop reason."""
    params = message.sampling_params
    prompt = int32_view(message.prompt_token_ids).tolist()
    fingerprint = fingerprints(
        prompt, params.seed, message.lora.name if message.lora else "", message.encoder_inputs
    )[-1]
    places = places_of(message.encoder_inputs)
    limit = max_total_tokens - len(prompt)
    if params.max_tokens is not None:
        limit = min(limit, params.max_tokens)
    if limit < 1 and message.pooling_params is None:
        # The inputs of an open request ended within its prompt.
        return [], FinishReason.LENGTH, None
    eos = () if params.ignore_eos else message.eos_token_ids
    output: list[int] = []
    while True:
        allowed = None
        if params.structured_output is not None:
            allowed = allowed_tokens(len(output), vocab_size)
        token_id = choose_token(fingerprint, vocab_size, allowed)
        fingerprint = extend_at(fingerprint, token_id, len(prompt) + len(output), places)
        output.append(token_id)
        may_stop = len(output) >= params.min_tokens or params.structured_output is not None
        if may_stop and token_id in (*eos, *params.stop_token_ids):
            return output, FinishReason.STOP, None if token_id in eos else token_id
        if len(output) >= limit:
            return output, FinishReason.LENGTH, None


def adapter(name: str) -> LoraAdapter | None:
    """Return the adapter that requests with this name use. Workers cannot load one whose name begins with "bad"."""
    return LoraAdapter(name, f"/{name}", sha256(name.encode()).digest()) if name else None
