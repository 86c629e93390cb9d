"""`engine bench`, `engine top` and `engine doctor` with a real server."""

from __future__ import annotations

import json
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from support.servers.server import COMMAND, Server

SMALL = ("--random-input-len", "16", "--random-output-len", "6", "--random-vocab-size", "20000")


def run(*arguments: str, code: int | None = 0) -> list[dict[str, Any]]:
    """Return the lines of JSON that a command prints. Its exit code must be `code`, unless that is None."""
    done = subprocess.run(
        [*COMMAND, *arguments, "--json"], capture_output=True, text=True, timeout=240
    )
    assert code is None or done.returncode == code, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_bench_serve_measures_each_point(server: Server, tmp_path: Path) -> None:
    plot, file = tmp_path / "plot.svg", tmp_path / "results.jsonl"
    common = ("bench", "serve", "--url", server.url, "--num-prompts", "4", *SMALL)
    results = run(
        *(*common, "--max-concurrency", "1", "2", "--goodput", "ttft:100000"),
        *("--plot", str(plot), "--result-filename", str(file)),
    )
    assert [json.loads(line) for line in file.read_text().splitlines()] == results
    assert [result["max_concurrency"] for result in results] == [1, 2]
    assert [result["max_concurrent_requests"] for result in results] == [1, 2]
    for result in results:
        assert (result["completed"], result["failed"]) == (4, 0)
        assert result["total_input_tokens"] == 64 and result["total_output_tokens"] == 24
        assert result["cached_tokens"] == 0
        assert result["request_goodput"] == pytest.approx(result["request_throughput"])
        assert result["output_throughput"] == pytest.approx(24 / result["duration"])
        assert 0 < result["median_ttft_ms"] <= result["median_e2el_ms"]
        assert result["median_ttft_ms"] <= result["p99_ttft_ms"]
    assert "2 at once" in "".join(ET.parse(plot).getroot().itertext())
    (rated,) = run(*common, "--request-rate", "20")
    assert rated["request_rate"] == 20 and rated["completed"] == 4


def test_bench_agents_find_their_conversation_cached(server: Server) -> None:
    (result,) = run(
        *("bench", "serve", "--url", server.url, "--dataset-name", "agent", "--num-prompts", "2"),
        *("--agent-turns", "3", "--agent-system-len", "64", "--agent-input-len", "16"),
        *("--agent-output-len", "4", "--max-concurrency", "1", "--num-warmups", "0"),
    )
    assert result["completed"] == 6 and result["backend"] == "openai-chat"
    # Every request except the first begins with the system prompt and the messages of an earlier request.
    assert result["cached_tokens"] > 5 * 48


def test_bench_compare_alternates_and_divides(server: Server, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    (result,) = run(
        *("bench", "compare", server.url, server.url + "/v1", "--rounds", "2"),
        *("--num-prompts", "2", *SMALL, "--plot", str(plot)),
    )
    assert [len(each["rounds"]) for each in result["servers"]] == [2, 2]
    assert {each["model"] for each in result["servers"]} == {"smollm2"}
    first, second = (each["median"]["output_throughput"] for each in result["servers"])
    assert result["ratios"]["output_throughput"] == pytest.approx([1, second / first])
    assert plot.exists()


def test_bench_reports_throughput_latency_and_failures(server: Server) -> None:
    target = ("--url", server.url)
    (result,) = run("bench", "throughput", *target, "--num-prompts", "3", *SMALL)
    assert result["num_requests"] == 3 and result["total_num_tokens"] == 3 * 22
    (result,) = run(
        *("bench", "latency", *target, "--batch-size", "2", "--input-len", "8"),
        *("--output-len", "4", "--num-iters", "2", "--num-iters-warmup", "1"),
    )
    assert len(result["latencies"]) == 2
    assert min(result["latencies"]) <= result["percentiles"]["50"] <= max(result["latencies"])
    # Longer than the server's maximum.
    failing = ("--random-input-len", "4000", "--num-warmups", "0", "--num-prompts", "1")
    (result,) = run("bench", "serve", *target, *failing, code=1)
    assert result["failed"] == 1 and "HTTP 400" in result["first_error"]


def test_top_shows_rates_and_status_shows_processes(server: Server) -> None:
    (rates,) = run("top", "--url", server.url, "--once", "--interval", "0.2")
    assert rates["running"] == 0 and set(rates["latencies_ms"]) == {"ttft", "itl", "queue", "e2e"}
    table = subprocess.run(
        [*COMMAND, "top", "--url", server.url, "--once", "--interval", "0.2"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    assert "tokens/s" in table and "KV cache" in table and "worker 0" in table
    assert all(len(line) <= 80 for line in table.splitlines()) and table.endswith("%\n")
    (status,) = run("status", "--url", server.url, "--once")
    assert status["stage"] == "ready" and status["processes"]


def test_doctor_measures_this_machine() -> None:
    # The exit code depends on the settings of the machine.
    (diagnosis,) = run("doctor", code=None)
    assert diagnosis["cores"] >= 1 and diagnosis["instruction_set"]
    assert diagnosis["bandwidth"] > 1e7
    default = next(m for m in diagnosis["models"] if m["name"].startswith("SmolLM2"))
    assert default["tokens_s"] == pytest.approx(diagnosis["bandwidth"] / default["weight_bytes"])
    assert {"open files", "cache"} <= {check["name"] for check in diagnosis["checks"]}
