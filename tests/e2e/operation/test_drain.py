"""Shutdown of an engine of many processes: streams finish, and nothing is left behind."""

from __future__ import annotations

import signal
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from support.checkpoints.tiny import qwen3_directory
from support.processes.program import has_ended, wait_until
from support.requests.mixed_streams import Streams
from support.servers.server import Server, default_model

MANY = (
    *("--data-parallel-size", "2", "--api-server-count", "2", "--tensor-parallel-size", "2"),
    # Tests suspend the workers.
    *("--heartbeat-timeout", "60"),
)
NUM_PROCESSES = 2 + 2 + 4
STREAM = {"max_tokens": 150, "ignore_eos": True, "temperature": 0, "stream": True}


@pytest.fixture
def server(tmp_path: Path) -> Server:
    model, run = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    run.mkdir()
    path, _ = qwen3_directory(model)
    flags = ("--dtype", "float32", "--max-num-seqs", "32", *MANY)
    return Server(str(path), *flags, env={"XDG_RUNTIME_DIR": str(run)})


def open_streams(server: Server, count: int) -> Streams:
    streams = Streams(server, [{"prompt": [5 + i, 6, 7], **STREAM} for i in range(count)])
    wait_until(lambda: all(stream.num_events for stream in streams.streams), what="all stream")
    return streams


def assert_nothing_is_left(server: Server, tmp_path: Path) -> None:
    assert len(server.children) >= NUM_PROCESSES
    wait_until(lambda: all(map(has_ended, server.children)), what="all processes end")
    wait_until(lambda: list((tmp_path / "run").rglob("*")) == [], what="the run directory goes")


def test_a_drain_rejects_new_requests_and_finishes_fifty_streams(
    server: Server, tmp_path: Path
) -> None:
    with server:
        streams = open_streams(server, 50)
        with server.suspended_workers():
            server.signal_all(signal.SIGTERM)
            wait_until(lambda: server.get("/readyz")[0] == 503, what="not ready")
            refusals: list[urllib.error.HTTPError] = []
            request = urllib.request.Request(
                f"{server.url}/v1/completions",
                b'{"prompt": [5], "max_tokens": 1}',
                {"content-type": "application/json"},
            )

            def is_refused() -> bool:
                # A frontend that has not received it yet accepts the request, which then waits.
                with suppress(TimeoutError):
                    try:
                        urllib.request.urlopen(request, timeout=5).close()
                    except urllib.error.HTTPError as error:
                        refusals.append(error)
                return bool(refusals)

            wait_until(is_refused, what="the other frontend has received it, too")
        assert refusals[0].code == 503
        assert int(refusals[0].headers["retry-after"]) > 0
        for answer in streams.answers():
            assert answer["done"] and answer[0]["finish_reason"] == "length"
        assert server.wait() == 0, server.log
    assert_nothing_is_left(server, tmp_path)


def test_a_drain_finishes_a_beam_search(server: Server, tmp_path: Path) -> None:
    body = {"prompt": [5, 6, 7], "n": 2, "use_beam_search": True, "max_tokens": 100}
    with server, ThreadPoolExecutor(1) as pool:
        search = pool.submit(server.post, "/v1/completions", body | {"ignore_eos": True})
        wait_until(lambda: server.metric("engine:generation_tokens_total") > 20, what="steps")
        # The rest of its steps are sent to the replicas while the server accepts nothing else.
        server.process.send_signal(signal.SIGTERM)
        status, answer = search.result()
        assert (status, answer["usage"]["completion_tokens"]) == (200, 200), answer
        assert server.wait() == 0, server.log
    assert_nothing_is_left(server, tmp_path)


def test_a_second_signal_ends_everything_at_once(server: Server, tmp_path: Path) -> None:
    with server:
        streams = open_streams(server, 20)
        with server.suspended_workers():
            server.signal_all(signal.SIGTERM)
            wait_until(lambda: server.get("/readyz")[0] == 503, what="not ready")
            server.signal_all(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM
        assert any("done" not in answer for answer in streams.answers())
    assert_nothing_is_left(server, tmp_path)


def test_a_killed_guardian_leaves_no_orphan(server: Server, tmp_path: Path) -> None:
    with server:
        streams = open_streams(server, 10)
        server.process.kill()
        server.process.wait()
        streams.answers()
    assert_nothing_is_left(server, tmp_path)


def test_no_client_waits_after_all_frontends_have_exited() -> None:
    with Server(default_model(), "--device", "null") as server:
        host, port = server.url.removeprefix("http://").split(":")
        worker, frontend = server.child("worker 0"), server.child("frontend 0")
        # It delays the exit of the other processes by some seconds.
        worker.suspend()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: has_ended(frontend), what="the frontend ends")

        def is_refused() -> bool:
            try:
                socket.create_connection((host, int(port)), timeout=20).close()
            except ConnectionRefusedError:
                return True
            return False

        wait_until(is_refused, what="connections are refused")
        assert not has_ended(worker)
        assert server.wait() == 0
