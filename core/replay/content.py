"""Leave out of recorded messages what no replay reads: media, and parameters that only workers or connectors read.

A log that kept them could hold gigabytes, because they may be far larger than what a scheduler reads of a request.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any, Final

import msgspec

from ...protocol.encoder_inputs.inputs import EncoderInput
from ...protocol.messages import AppendInputs, EngineCoreRequest
from ...protocol.sampling_params import SamplingParams
from ...protocol.worker_messages import (
    EncoderWork,
    KVConnectorOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from .snapshot import without_content

EMPTY: Final[list[Any]] = []
"""An empty list that all recorded events share, because those of their own would take a fourth of the log's memory."""

_NO_PARAMS: Final = SamplingParams()


def drop_content(message: EngineCoreRequest) -> None:
    """Remove the media of a recorded request, and the parameters that the scheduler does not read."""
    message.sampling_params = without_content(message.sampling_params)
    message.kv_transfer_params = message.trace_headers = None
    if message.encoder_inputs:
        message.encoder_inputs = _without_media(message.encoder_inputs)


def growth_without_content(message: AppendInputs) -> AppendInputs:
    """Return the message without the media of its inputs."""
    return msgspec.structs.replace(message, inputs=_without_media(message.inputs))


def report_without_content(output: KVConnectorOutput) -> KVConnectorOutput:
    """Return a worker's report without the data for the connector."""
    return msgspec.structs.replace(output, data=b"") if output.data else output


def result_without_content(result: ModelRunnerOutput) -> ModelRunnerOutput:
    """Return the result of a step without tokens, log-probabilities and pooled vectors."""
    kept = copy(result)
    kept.sampled_token_ids = b""
    kept.logprobs = kept.prompt_logprobs = kept.pooled = EMPTY
    kept.failed_slots = result.failed_slots or EMPTY
    return kept


def step_without_content(step: SchedulerOutput) -> SchedulerOutput:
    """Return a step without media, and without the parameters that only workers read. Its hash stays the same."""
    kept = copy(step)
    kept.new_requests = list(map(_new_request_without_content, step.new_requests))
    kept.kv_connector_metadata = b""
    if (work := step.encoders) is not None:
        kept.encoders = EncoderWork(work.freed_hashes, work.computed, work.loaded)
    return kept


def _new_request_without_content(data: NewRequestData) -> NewRequestData:
    kept = copy(data)
    kept.sampling_params = _NO_PARAMS
    kept.encoder_inputs = []
    kept.predicted_token_ids = b""
    return kept


def _without_media(inputs: Iterable[EncoderInput]) -> list[EncoderInput]:
    return [msgspec.structs.replace(item, data=b"") for item in inputs]
