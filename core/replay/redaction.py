"""Remove user content from a log so that the log still replays exactly.

Numbers replace block hashes, and made-up names replace names; equal originals get equal replacements. Sampled tokens
are replaced unless some request stops at them. Fields that are not listed in this file are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np

from ...protocol.arrays import Int32Array, int32_bytes, int32_view
from ...protocol.block_hash import HASH_BYTES
from ...protocol.config import KVTransferConfig, SchedulerConfig
from ...protocol.encoder_inputs.inputs import EncoderInput
from ...protocol.file_identity import LoraAdapter
from ...protocol.kv_transfer.multi import needs_checks
from ...protocol.messages import AppendInputs, EngineCoreRequest, FinishedRequest
from ...protocol.sampling_params import SamplingParams
from ...protocol.worker_messages import (
    DraftTokenIds,
    EncoderWork,
    LoraLoad,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from . import events
from . import snapshot as state
from .events import AddRequest, Answer, Call, ClientReport, Event, Schedule, TakeOutputs, Update
from .frozen_state import Blank
from .snapshot import Node, Snapshot, without_content

_NO_PARAMS: Final = SamplingParams()
_NO_LORA: Final = LoraAdapter("", "", b"")

KEPT_STRINGS: Final = frozenset({"request_id"})
"""Fields whose strings are kept as they are."""


class Pseudonyms:
    """Replacements for digests and names. Equal originals get equal replacements within one dump."""

    def __init__(self) -> None:
        self._digests: dict[bytes, int] = {}
        self._names: dict[str, str] = {"": ""}

    def numbers(self, digests: bytes) -> bytes:
        """Return the numbers of N digests as int32[N]."""
        numbers = self._digests
        starts = range(0, len(digests), HASH_BYTES)
        pieces = (digests[start : start + HASH_BYTES] for start in starts)
        return int32_bytes([numbers.setdefault(piece, len(numbers)) for piece in pieces])

    def name(self, original: str) -> str:
        """Return the replacement of a name. The empty name stays empty."""
        return self._names.setdefault(original, f"name{len(self._names)}")


def redact_config(config: SchedulerConfig, pseudonyms: Pseudonyms) -> SchedulerConfig:
    """Return the configuration with the names of tenants replaced."""
    weights = {pseudonyms.name(n): weight for n, weight in config.tenant_weights.items()}
    return msgspec.structs.replace(config, tenant_weights=weights)


def redact_kv_transfer(config: KVTransferConfig) -> KVTransferConfig:
    """Return only the settings that the scheduler itself reads."""
    return KVTransferConfig(
        "recorded",
        kv_role=config.kv_role,
        kv_connector_module_path="recorded" if needs_checks(config) else None,
        kv_load_failure_policy=config.kv_load_failure_policy,
        transfer_timeout_s=config.transfer_timeout_s,
        load_timeout_s=config.load_timeout_s,
    )


def redact_snapshot(snapshot: Snapshot, pseudonyms: Pseudonyms) -> Snapshot:
    """Return the snapshot with strings, digests and user content replaced."""
    layouts = snapshot.layouts

    def redact(node: Node) -> Node:
        match node:
            case state.Text(original):
                return state.Text(pseudonyms.name(original))
            case bytes() if len(node) == HASH_BYTES + 1:
                return state.GroupKey(pseudonyms.numbers(node[:HASH_BYTES]), node[HASH_BYTES])
            case bytes():
                if len(node) % HASH_BYTES:
                    return Blank((len(node),))
                return state.Digests(pseudonyms.numbers(node)) if node else node
            case state.Sequence(kind, items):
                return state.Sequence(kind, [redact(item) for item in items])
            case state.Mapping(kind, keys, values):
                return state.Mapping(kind, [redact(k) for k in keys], [redact(v) for v in values])
            case state.Instance(layout, fields):
                names = layouts[layout].fields
                pairs = zip(names, fields, strict=True)
                kept = [node if n in KEPT_STRINGS else redact(node) for n, node in pairs]
                return state.Instance(layout, kept)
            case _:
                return node

    return Snapshot(layouts, redact(snapshot.root))


def redact_events(recorded: Iterable[Event], pseudonyms: Pseudonyms) -> list[Event]:
    """Return the events with user content replaced. The log must have been flushed before."""
    redacted: list[Event] = []
    for event in recorded:
        match event:
            case AddRequest():
                message = _redact_request(event.message, pseudonyms)
                event = msgspec.structs.replace(event, message=message)
            case Call(args=(client_index, AppendInputs() as growth)):
                inputs = _redact_inputs(growth.inputs, pseudonyms)
                redacted_growth = msgspec.structs.replace(growth, inputs=inputs)
                event = Call(event.method, (client_index, redacted_growth))
            case Schedule(step=SchedulerOutput() as step):
                event = msgspec.structs.replace(event, step=redact_step(step))
            case Update():
                event = msgspec.structs.replace(
                    event,
                    result=_redact_result(event.result),
                    reports=[_redact_report(report) for report in event.reports],
                )
            case TakeOutputs():
                event = msgspec.structs.replace(
                    event, reports=[_redact_report(report) for report in event.reports]
                )
            case Answer(call=events.HASH_BLOCKS, about=about, value=bytes(digests)):
                event = Answer(events.HASH_BLOCKS, about, pseudonyms.numbers(digests))
        redacted.append(event)
    return redacted


def redact_step(step: SchedulerOutput) -> SchedulerOutput:
    """Return a step in which int32 token counts replace the tokens."""
    work = step.encoders
    return msgspec.structs.replace(
        step,
        new_requests=[_redact_new_request(data) for data in step.new_requests],
        draft_token_ids=step.draft_token_ids and int32_bytes(len(step.draft_token_ids) // 4),
        kv_connector_metadata=b"",
        encoders=work and EncoderWork([b""] * len(work.freed_hashes), work.computed, work.loaded),
        lora_loads=[LoraLoad(load.number, _NO_LORA) for load in step.lora_loads],
    )


def _redact_new_request(data: NewRequestData) -> NewRequestData:
    return NewRequestData(
        slot=data.slot,
        request_id=data.request_id,
        token_ids=int32_bytes(len(data.token_ids) // 4),
        num_prompt_tokens=data.num_prompt_tokens,
        num_computed_tokens=data.num_computed_tokens,
        block_ids=data.block_ids,
        sampling_params=_NO_PARAMS,
        lora_number=data.lora_number,
        pooling_params=data.pooling_params,
    )


def _redact_request(message: EngineCoreRequest, pseudonyms: Pseudonyms) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_index=message.request_index,
        prompt_token_ids=b"",
        output_token_ids=bytes(len(message.output_token_ids)),
        predicted_token_ids=bytes(len(message.predicted_token_ids)),
        sampling_params=without_content(message.sampling_params),
        arrival_time=message.arrival_time,
        eos_token_ids=message.eos_token_ids,
        block_hashes=pseudonyms.numbers(message.block_hashes),
        root_hash=pseudonyms.numbers(message.root_hash),
        priority=message.priority,
        tenant=pseudonyms.name(message.tenant),
        deadline=message.deadline,
        request_id=message.request_id,
        lora=message.lora and _redact_lora(message.lora, pseudonyms),
        is_resubmitted=message.is_resubmitted,
        is_suspect=message.is_suspect,
        was_index=message.was_index,
        pooling_params=message.pooling_params,
        delivery_times=message.delivery_times,
        encoder_inputs=_redact_inputs(message.encoder_inputs, pseudonyms),
        is_open=message.is_open,
        is_warm_up=message.is_warm_up,
    )


def _redact_inputs(inputs: Iterable[EncoderInput], pseudonyms: Pseudonyms) -> list[EncoderInput]:
    return [
        msgspec.structs.replace(item, content_hash=pseudonyms.numbers(item.content_hash))
        for item in inputs
    ]


def _redact_lora(adapter: LoraAdapter, pseudonyms: Pseudonyms) -> LoraAdapter:
    return LoraAdapter(
        pseudonyms.name(adapter.name),
        pseudonyms.name(adapter.path),
        pseudonyms.numbers(adapter.version),
        adapter.scale,
    )


def _redact_result(result: ModelRunnerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        step=result.step,
        num_sampled=result.num_sampled,
        num_verified=result.num_verified,
        nan_slots=result.nan_slots,
        failed_slots=[(slot, "") for slot, _ in result.failed_slots],
        kv_connector_output=result.kv_connector_output,
        prediction_counts=result.prediction_counts,
        drafts=result.drafts,
        seconds=result.seconds,
        draft_seconds=result.draft_seconds,
        draft_passes=result.draft_passes,
    )


def _redact_report(report: ClientReport) -> ClientReport:
    finished = [
        FinishedRequest(end.request_index, end.reason, end.stop_reason) for end in report.finished
    ]
    return msgspec.structs.replace(report, finished=finished)


def expand_request(event: AddRequest) -> EngineCoreRequest:
    """Return the request of a redacted `AddRequest` event, with zeros in place of its tokens."""
    message = event.message
    return msgspec.structs.replace(
        message,
        prompt_token_ids=bytes(event.num_prompt_bytes),
        block_hashes=state.expand_digests(message.block_hashes),
        root_hash=state.expand_digests(message.root_hash),
        lora=message.lora
        and msgspec.structs.replace(
            message.lora, version=state.expand_digests(message.lora.version)
        ),
        encoder_inputs=_expand_inputs(message.encoder_inputs),
    )


def expand_growth(message: AppendInputs) -> AppendInputs:
    """Return the message of a redacted call of `append_inputs`."""
    return msgspec.structs.replace(message, inputs=_expand_inputs(message.inputs))


def _expand_inputs(inputs: Iterable[EncoderInput]) -> list[EncoderInput]:
    return [
        msgspec.structs.replace(item, content_hash=state.expand_digests(item.content_hash))
        for item in inputs
    ]


def expand_result(event: Update, neutral_token: int) -> ModelRunnerOutput:
    """Return the message of a redacted output, with `neutral_token` for every token at which no request stops."""
    token_ids: Int32Array = np.full(event.num_tokens, neutral_token, np.int32)
    stops = int32_view(event.stops).reshape(-1, 2)
    token_ids[stops[:, 0]] = stops[:, 1]
    drafts = event.result.drafts
    return msgspec.structs.replace(
        event.result,
        sampled_token_ids=int32_bytes(token_ids),
        drafts=drafts and expand_drafts(drafts),
    )


def expand_drafts(drafts: DraftTokenIds) -> DraftTokenIds:
    """Return redacted drafts with the original number of tokens, all zeros."""
    num_tokens = int(int32_view(drafts.token_ids)[0])
    return msgspec.structs.replace(drafts, token_ids=bytes(4 * num_tokens))
