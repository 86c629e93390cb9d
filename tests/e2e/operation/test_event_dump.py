"""The event log of a real engine: dumped on demand and on a crash, replayed, explained, simulated."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from engine.core.replay.dump import SUFFIX, read_dump
from support.checkpoints.shallow_model import shallow_model
from support.processes.program import wait_until
from support.servers.server import Server

BODY = {"prompt": "The quick brown fox jumps over the lazy dog, and", "max_tokens": 24, "seed": 1}


def engine(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine.frontend.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def dumps(directory: Path, reason: str) -> list[Path]:
    return sorted(directory.glob(f"*-{reason}{SUFFIX}")) if directory.exists() else []


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> tuple[Server, Path]:
    """A server that dumps into a directory and has answered requests."""
    directory = tmp_path_factory.mktemp("run") / "dumps"
    with Server(shallow_model(), "--max-model-len", "1024", "--dump-dir", str(directory)) as server:
        for number in range(3):
            assert server.post("/v1/completions", {**BODY, "n": number + 1})[0] == 200
        yield server, directory
        assert server.stop() == 0, server.log


def test_a_dump_over_http_is_replayed_explained_and_simulated(served, tmp_path):
    server, directory = served
    status, answer = server.post("/debug/dump", {})
    assert status == 200, answer
    (path,) = map(Path, answer["files"])
    assert path.parent == directory
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"quick" not in path.read_bytes()

    replayed = engine("replay", str(path))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "all as recorded" in replayed.stdout

    request_id = next(
        event.message.request_id
        for event in read_dump(path).segments[0].events
        if getattr(event, "message", None) is not None and event.message.request_id != "warm-up"
    )
    why = engine("replay", str(path), "--why", request_id)
    assert "first token" in why.stdout and "ended: length" in why.stdout, why.stdout + why.stderr

    picture = tmp_path / "plot.svg"
    simulated = engine("simulate", str(path), "--replicas", "1,2", "--json", "--plot", str(picture))
    assert simulated.returncode == 0, simulated.stderr
    one, two = map(json.loads, simulated.stdout.splitlines())
    assert one["finished"] == two["finished"] == 7
    assert one["ttft_p50_ms"] > 0
    assert picture.read_text().startswith("<svg")


def test_why_explains_a_request_of_the_running_server(served):
    server, directory = served
    before = dumps(directory, "*")
    status, answer = server.post("/v1/completions", BODY)
    assert status == 200
    why = engine("why", answer["id"].removeprefix("cmpl-"), "--url", server.url)
    assert "first token" in why.stdout and "ended: length" in why.stdout, why.stdout + why.stderr
    assert dumps(directory, "*") == before
    unknown = engine("why", "nobody", "--url", server.url)
    assert unknown.returncode == 1 and "do not contain the request" in unknown.stderr


def test_sigusr1_writes_a_dump_and_the_engine_continues(served):
    server, directory = served
    core = server.child("core 0")
    for count in (1, 2):
        core.send_signal(signal.SIGUSR1)
        wait_until(lambda count=count: len(dumps(directory, "signal")) == count, what="a dump")
    assert server.post("/v1/completions", BODY)[0] == 200
    assert engine("replay", str(dumps(directory, "signal")[0])).returncode == 0


def test_a_core_that_loses_its_worker_writes_a_dump(tmp_path):
    directory = tmp_path / "dumps"
    args = (shallow_model(), "--max-model-len", "512", "--dump-dir", str(directory))
    with Server(*args) as server:
        assert server.post("/v1/completions", BODY)[0] == 200
        server.child("worker 0").kill()
        wait_until(lambda: dumps(directory, "crash"), what="a dump")
        assert server.post("/v1/completions", BODY)[0] == 200
        assert server.stop() == 0
    (path,) = dumps(directory, "crash")
    assert engine("replay", str(path)).returncode == 0


def test_dumps_over_http_require_the_flag(server):
    status, answer = server.post("/debug/dump", {})
    assert status == 403
    assert "--dump-dir" in answer["error"]["message"]
