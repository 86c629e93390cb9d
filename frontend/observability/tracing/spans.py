"""Create the spans of a trace.

Names and attributes follow OpenTelemetry's semantic conventions for HTTP servers and generative AI
(https://github.com/open-telemetry/semantic-conventions-genai); `gen_ai.latency.*` are vLLM's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from .... import __version__
from ....protocol.sampling_params import SamplingParams
from .context import TraceContext, new_span_id
from .request_trace import RequestTrace, SequenceRecord

Value = str | int | float | bool | list[str]

OPERATIONS: Final = {
    "/chat/completions": "chat",
    "/chat/completions/batch": "chat",
    "/responses": "chat",
    "/messages": "chat",
    "/api/chat": "chat",
    "/completions": "text_completion",
    "/api/generate": "text_completion",
    "/embeddings": "embeddings",
    "/api/embed": "embeddings",
}
"""End of a path -> `gen_ai.operation.name`."""

_FAILED: Final = 500
"""The lowest HTTP status that means that the server failed."""


def span_context(context: TraceContext, span_id: int, *, is_remote: bool = False) -> SpanContext:
    """Return the SDK's object for a span in the same trace as `context`."""
    state = TraceState.from_header([context.state]) if context.state else TraceState()
    return SpanContext(context.trace_id, span_id, is_remote, TraceFlags(context.flags), state)


class SpanMaker:
    """Makes the spans of traces.

    Args:
        resource: The description of this process.
        model_name: The name of the model without an adapter.
    """

    def __init__(self, resource: Resource, model_name: str) -> None:
        self._resource = resource
        self._model_name = model_name
        self._scope = InstrumentationScope("engine", __version__)

    def make_spans(self, traces: Sequence[RequestTrace]) -> list[ReadableSpan]:
        """Return the span of each request, followed by its children."""
        # Monotonic times are converted to times of day together, so that a clock change cannot shift parts of a trace.
        epoch_ns = time.time_ns() - time.monotonic_ns()
        return [span for trace in traces for span in self._make_trace(trace, epoch_ns)]

    def _make_trace(self, trace: RequestTrace, epoch_ns: int) -> Iterator[ReadableSpan]:
        operation = next((name for end, name in OPERATIONS.items() if trace.path.endswith(end)), "")
        attributes: dict[str, Value] = {}
        if trace.method:
            attributes |= {"http.request.method": trace.method, "url.path": trace.path}
        if trace.status:
            attributes["http.response.status_code"] = trace.status
        if trace.request_id:
            attributes["gen_ai.request.id"] = trace.request_id
        name = trace.method or "continue"
        if trace.num_sequences:
            model = trace.lora_name or self._model_name
            if operation and trace.method:
                name = f"{operation} {model}"
            attributes |= self._inference_attributes(trace, operation, model)
        status = Status()
        if trace.errors or trace.status >= _FAILED:
            attributes["error.type"] = (
                str(trace.status) if trace.status >= _FAILED else trace.finish_reasons[0]
            )
            status = Status(StatusCode.ERROR, trace.errors[0] if trace.errors else None)
        yield self._span(
            trace.context,
            trace.context.span_id,
            trace.parent_id,
            name,
            (trace.start_time, trace.end_time),
            epoch_ns,
            attributes,
            SpanKind.SERVER if trace.method else SpanKind.INTERNAL,
            status,
            has_remote_parent=bool(trace.method),
        )
        for position, sequence in enumerate(trace.sequences):
            shared: dict[str, Value] = {"engine.replica": sequence.core_index}
            if trace.num_sequences > 1:
                shared["engine.sequence"] = position
            for part, times, more in _parts(sequence):
                yield self._span(
                    trace.context,
                    new_span_id(),
                    trace.context.span_id,
                    part,
                    times,
                    epoch_ns,
                    shared | more,
                )

    def _inference_attributes(
        self, trace: RequestTrace, operation: str, model: str
    ) -> dict[str, Value]:
        attributes: dict[str, Value] = {
            "gen_ai.provider.name": "engine",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": trace.finish_reasons,
            "gen_ai.usage.input_tokens": trace.num_input_tokens,
            "gen_ai.usage.output_tokens": trace.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": trace.num_cached_tokens,
            "gen_ai.usage.num_sequences": trace.num_sequences,
            "gen_ai.latency.e2e": trace.end_time - trace.start_time,
        }
        if operation:
            attributes["gen_ai.operation.name"] = operation
        if trace.params is not None and operation != "embeddings":
            attributes |= _parameters(trace.params)
        if trace.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = trace.max_tokens
        if trace.first_token_time:
            waited = trace.first_token_time - trace.start_time
            attributes["gen_ai.latency.time_to_first_token"] = waited
        first = trace.sequences[0]
        for name, start, end in (
            ("time_in_queue", first.arrival_time, first.scheduled_time),
            ("time_in_model_prefill", first.scheduled_time, first.first_token_time),
            ("time_in_model_decode", first.first_token_time, first.last_token_time),
            ("time_in_model_inference", first.scheduled_time, first.last_token_time),
        ):
            if start and end:
                attributes[f"gen_ai.latency.{name}"] = end - start
        return attributes

    def _span(
        self,
        context: TraceContext,
        span_id: int,
        parent_id: int,
        name: str,
        times: tuple[float, float],
        epoch_ns: int,
        attributes: Mapping[str, Value],
        kind: SpanKind = SpanKind.INTERNAL,
        status: Status | None = None,
        *,
        has_remote_parent: bool = False,
    ) -> ReadableSpan:
        start, end = times
        parent = span_context(context, parent_id, is_remote=has_remote_parent)
        return ReadableSpan(
            name,
            span_context(context, span_id),
            parent if parent_id else None,
            self._resource,
            attributes,
            kind=kind,
            status=status or Status(),
            start_time=int(start * 1e9) + epoch_ns,
            end_time=int(end * 1e9) + epoch_ns,
            instrumentation_scope=self._scope,
        )


def _parts(
    sequence: SequenceRecord,
) -> Iterator[tuple[str, tuple[float, float], dict[str, Value]]]:
    """Yield name, (start, end) and attributes of each phase of a sequence's life."""
    end = sequence.finish_time
    scheduled, first = sequence.scheduled_time, sequence.first_token_time
    yield "queue", (sequence.arrival_time, scheduled or first or end), {}
    if scheduled:
        counts: dict[str, Value] = {
            "gen_ai.usage.input_tokens": sequence.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": sequence.num_cached_tokens,
        }
        yield "prefill", (scheduled, first or end), counts
    if first:
        counts = {
            "gen_ai.usage.output_tokens": sequence.num_generated_tokens,
            "engine.accepted_draft_tokens": sequence.num_drafted_tokens,
            "engine.preemptions": sequence.num_preemptions,
        }
        yield "decode", (first, sequence.last_token_time), counts
    for recovery in sequence.recoveries:
        times = (recovery.lost_time, recovery.resumed_time or end)
        yield "recovery", times, {"engine.recovery.tokens": recovery.num_tokens}


def _parameters(params: SamplingParams) -> dict[str, Value]:
    values: dict[str, Value | None] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or None,
        "seed": params.seed,
        "frequency_penalty": params.frequency_penalty or None,
        "presence_penalty": params.presence_penalty or None,
        "choice.count": params.n if params.n > 1 else None,
    }
    return {f"gen_ai.request.{name}": value for name, value in values.items() if value is not None}
