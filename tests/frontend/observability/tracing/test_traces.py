"""Traces that a collector receives from a frontend whose core repeats the last message."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from support.servers.frontend_process import MODEL, FrontendProcess, sound_frontend
from support.servers.otlp_collector import Collector, attributes_of

pytestmark = pytest.mark.slow

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "one two three"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def frontend(collector: Collector) -> Iterator[FrontendProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
        with sound_frontend(otlp_traces_endpoint=collector.endpoint) as process:
            yield process


def parent_of(trace_id: str, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{PARENT_ID}-{flags}", "tracestate": "vendor=1"}


def test_client_context_is_the_parent_of_one_connected_trace(
    frontend: FrontendProcess, collector: Collector
) -> None:
    before = len(frontend.core.received)
    answer = frontend.http.post("/v1/chat/completions", json=CHAT, headers=parent_of(TRACE_ID))
    server, *children = collector.find_trace(TRACE_ID, 4)
    assert (server.name, server.kind) == (f"chat {MODEL}", Span.SPAN_KIND_SERVER)
    assert (server.parent_span_id.hex(), server.trace_state) == (PARENT_ID, "vendor=1")
    assert [child.name for child in children] == ["queue", "prefill", "decode"]
    assert {child.parent_span_id for child in children} == {server.span_id}
    times = [
        time
        for child in children
        for time in (child.start_time_unix_nano, child.end_time_unix_nano)
    ]
    assert times == sorted(times)
    assert server.start_time_unix_nano <= times[0] and times[-1] <= server.end_time_unix_nano

    own = f"00-{TRACE_ID}-{server.span_id.hex()}-01"
    assert answer.headers["traceresponse"] == own
    [request] = [
        request
        for message in frontend.core.received[before:]
        for request in getattr(message, "requests", ())
    ]
    assert request.trace_headers == {"traceparent": own, "tracestate": "vendor=1"}

    usage, attributes = answer.json()["usage"], attributes_of(server)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.request.id": answer.headers["x-request-id"],
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
    }
    assert {name: attributes.get(name) for name in expected} == expected
    first = attributes["gen_ai.latency.time_to_first_token"]
    assert 0 < first < attributes["gen_ai.latency.e2e"]
    assert "one two three" not in str(collector.spans)

    [resource] = {tuple(sorted(each.items())) for each in collector.resources}
    assert {("service.name", "engine"), ("deployment.environment", "test")} < {*resource}


def test_streams_and_rejected_requests_are_traced(
    frontend: FrontendProcess, collector: Collector
) -> None:
    body = CHAT | {"stream": True, "n": 2, "seed": 1}
    headers = frontend.http.post("/v1/chat/completions", json=body).headers
    server, *children = collector.find_trace(headers["traceresponse"].split("-")[1], 7)
    assert server.parent_span_id == b"" and len(children) == 6
    assert attributes_of(server)["gen_ai.usage.output_tokens"] == 6
    assert [attributes_of(child)["engine.sequence"] for child in children] == [0] * 3 + [1] * 3

    headers = frontend.http.post("/v1/chat/completions", json=CHAT | {"model": "no"}).headers
    [server] = collector.find_trace(headers["traceresponse"].split("-")[1], 1)
    assert server.name == "POST" and server.status.code == Status.STATUS_CODE_UNSET
    assert attributes_of(server)["http.response.status_code"] == 404


def test_trace_that_the_client_does_not_sample_is_not_sent(
    frontend: FrontendProcess, collector: Collector
) -> None:
    unsampled, sampled = "1" * 32, "2" * 32
    for trace_id, flags in ((unsampled, "00"), (sampled, "01")):
        headers = parent_of(trace_id, flags)
        answer = frontend.http.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert answer.headers["traceresponse"].endswith(flags)
    collector.find_trace(sampled, 4)
    assert unsampled not in {span.trace_id.hex() for span in collector.spans}


def test_response_in_the_background_has_a_span_below_its_request(
    frontend: FrontendProcess, collector: Collector
) -> None:
    body = {"model": MODEL, "input": "one two three", "background": True, "max_output_tokens": 3}
    headers = frontend.http.post("/v1/responses", json=body).headers
    server, *others = collector.find_trace(headers["traceresponse"].split("-")[1], 4)
    by_name = {span.name: span for span in others}
    above = by_name.get("continue", server)
    assert above is server or above.parent_span_id == server.span_id
    assert by_name["decode"].parent_span_id == above.span_id
