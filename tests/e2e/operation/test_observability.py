"""The traces, log lines and metrics of a server whose worker was killed during a request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import yaml
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families
from support.checkpoints.shallow_model import shallow_model
from support.processes.program import wait_until
from support.servers.otlp_collector import Collector, attributes_of
from support.servers.server import Server

DEPLOY = Path(__file__).parents[3] / "docs" / "deploy"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
NUM_TOKENS = 60

OF_PROMETHEUS = {"instance", "job", "le"}
"""Labels that Prometheus adds, and that of buckets."""


class Observed(NamedTuple):
    server: Server
    spans: list[Span]
    request_id: str


@pytest.fixture(scope="module")
def observed() -> Iterator[Observed]:
    """Serve a request whose worker is killed, and return its spans."""
    options = ["--log-format", "json", "--enable-log-requests", "--max-model-len", "512"]
    environment = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
    with Collector(by_grpc=True) as collector:
        options += ["--otlp-traces-endpoint", collector.endpoint]
        with Server(shallow_model(), *options, env=environment) as server:
            request_id = stream_with_crash(server)
            yield Observed(server, collector.find_trace(TRACE_ID, 5), request_id)
            assert server.stop() == 0, server.log


def stream_with_crash(server: Server) -> str:
    """Kill the worker after the third event of a stream, and return the ID of the request after its end."""
    body = {
        "prompt": "Once upon a time",
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    worker = server.child("worker 0")
    url = server.url + "/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=240) as r:
        # An event may have several tokens on a busy machine.
        num_tokens: list[int] = []
        for line in r.iter_lines():
            if line.startswith("data: {"):
                num_tokens.append(json.loads(line[6:])["usage"]["completion_tokens"])
            if len(num_tokens) == 3 and worker.is_running():
                worker.kill()
                psutil.wait_procs([worker], timeout=40)
        assert num_tokens[2] < num_tokens[-1] == NUM_TOKENS
        request_id = r.headers["x-request-id"]
    server.wait_until_whole()
    return request_id


def test_trace_of_a_request_whose_worker_was_killed_is_connected(observed: Observed) -> None:
    server, *children = observed.spans
    assert (server.kind, server.parent_span_id.hex()) == (Span.SPAN_KIND_SERVER, PARENT_ID)
    assert server.name.startswith("text_completion ")
    assert attributes_of(server)["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert attributes_of(server)["gen_ai.request.id"] == observed.request_id
    by_name = {child.name: child for child in children}
    assert {*by_name} == {"queue", "prefill", "decode", "recovery"}
    assert {child.parent_span_id for child in children} == {server.span_id}
    recovery, decode = by_name["recovery"], by_name["decode"]
    assert decode.start_time_unix_nano < recovery.start_time_unix_nano
    assert recovery.start_time_unix_nano < recovery.end_time_unix_nano
    assert recovery.end_time_unix_nano <= decode.end_time_unix_nano
    assert 3 <= attributes_of(recovery)["engine.recovery.tokens"] < NUM_TOKENS


def test_every_line_of_a_json_log_is_an_object(observed: Observed) -> None:
    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in observed.server.log.splitlines()]

    assert observed.server.get("/v1/models")[0] == 200
    wait_until(
        lambda: any("/v1/models" in each["message"] for each in lines()), what="it is logged"
    )
    for line in lines():
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]), line
        assert {"level", "process", "message"} < {*line}, line
    assert {"supervisor", "core 0", "frontend 0"} <= {line["process"] for line in lines()}
    assert all(line["replica"] == 0 for line in lines() if line["process"] == "core 0")
    assert any(line.get("logger") == "uvicorn.access" for line in lines())


def test_responses_report_the_load_on_request(observed: Observed) -> None:
    body = {"prompt": "Two", "max_tokens": 2}
    with httpx.Client(base_url=observed.server.url, timeout=120) as client:

        def report(format_name: str) -> str | None:
            headers = {"endpoint-load-metrics-format": format_name}
            answer = client.post("/v1/completions", json=body, headers=headers)
            return answer.headers.get("endpoint-load-metrics")

        names = {"kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"}
        kind, _, value = (report("JSON") or "").partition(" ")
        assert kind == "JSON" and {*json.loads(value)["named_metrics"]} == names
        kind, _, value = (report("text") or "").partition(" ")
        pairs = dict(pair.split("=") for pair in value.split(", "))
        assert kind == "TEXT" and {*pairs} == {f"named_metrics.{name}" for name in names}
        assert all(float(number) >= 0 for number in pairs.values())
        assert report("BIN") is None
    assert observed.server.get("/load") == (200, {"server_load": 0})


def selectors(query: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the metrics of a query, and the values of labels that it compares with a constant."""
    for name, labels in re.findall(r"\b(engine:\w+)(?:\{([^}]*)\})?", query):
        matchers = re.findall(r'(\w+)(=~|=)"([^"]*)"', labels)
        assert len(matchers) == labels.count('="') + labels.count('=~"')
        yield name, {label: value if how == "=" else "" for label, how, value in matchers}


def check_query(query: str, samples: dict[str, list[dict[str, str]]], shown: set[str]) -> None:
    """Check that the metrics of a query exist with the labels that it and its texts name."""
    grouped = {
        label.strip()
        for labels in re.findall(r"\bby \(([^)]*)\)", query)
        for label in labels.split(",")
    }
    found = list(selectors(query))
    assert found, query
    for name, matched in found:
        assert name in samples, f"{name} of {query} is not in /metrics"
        wanted = grouped | shown | {*matched}
        for labels in samples[name]:
            assert wanted <= {*labels} | OF_PROMETHEUS, f"{wanted} of {query}: {name} has {labels}"
        for label, value in matched.items():
            assert not value or value in {labels[label] for labels in samples[name]}, query


def panels_of(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def test_dashboard_and_alerts_name_metrics_that_a_server_has(observed: Observed) -> None:
    _, text = observed.server.get("/metrics")
    samples: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample.labels)

    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    panels = list(panels_of(dashboard))
    assert len({panel["id"] for panel in panels}) == len(panels)
    targets = [target for panel in panels for target in panel.get("targets", ())]
    assert len(targets) > 20
    for target in targets:
        legend = {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])}
        check_query(target["expr"], samples, legend)
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert names >= {*re.findall(r"\$(\w+)", json.dumps(panels))} - {"__rate_interval"}

    [group] = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())["groups"]
    for rule in group["rules"]:
        texts = " ".join(rule["annotations"].values())
        check_query(rule["expr"], samples, {*re.findall(r"\$labels\.(\w+)", texts)})
    assert "engine:process_restarts_total" in json.dumps(group) and targets

    restarts = observed.server.metric("engine:process_restarts_total")
    assert restarts >= 1 and observed.server.metric("engine:replica_up") == 1
