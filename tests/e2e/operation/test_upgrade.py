"""`engine upgrade`: a server replaces another one, and no client is affected."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from support.checkpoints.shallow_model import shallow_model
from support.checkpoints.tiny import qwen3_directory
from support.processes.program import has_ended, wait_until
from support.requests.mixed_streams import Streams
from support.servers.server import COMMAND, Server, Upgrade

LONG = {
    "prompt": [5, 6, 7],
    "max_tokens": 2000,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}


class Requests:
    """A thread that sends one short request after the other, alternating between a kept connection and new ones."""

    def __init__(self, url: str) -> None:
        self.num_answers = 0
        self.failures: list[str] = []
        self._url = f"{url}/v1/completions"
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._send_all)

    def _send_all(self) -> None:
        body = {"prompt": [5, 6], "max_tokens": 2}
        with httpx.Client(timeout=60) as kept:
            while not self._is_over.is_set():
                for post in (kept.post, httpx.post):
                    try:
                        post(self._url, json=body, timeout=60).raise_for_status()
                        self.num_answers += 1
                    except httpx.HTTPError as error:
                        self.failures.append(repr(error))

    def __enter__(self) -> Requests:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


@pytest.fixture
def run_env() -> Iterator[dict[str, str]]:
    """A separate directory for sockets, because servers of other tests could be found otherwise. Its path is short."""
    with tempfile.TemporaryDirectory(prefix="run-", dir="/tmp") as directory:
        yield {"XDG_RUNTIME_DIR": directory}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path, _ = qwen3_directory(tmp_path_factory.mktemp("model"))
    yield str(path)


def test_streams_and_connections_outlive_an_upgrade(
    run_env: dict[str, str], tmp_path: Path
) -> None:
    kept = {"prompt": list(range(1000, 1300)), "max_tokens": 8, "temperature": 0}
    disk = ("--kv-disk", str(tmp_path), "--kv-disk-gib", "1")
    with Server(shallow_model(), "--max-num-seqs", "8", *disk, env=run_env) as old:
        status, before = old.post("/v1/completions", kept)
        assert status == 200
        streams = Streams(old, [LONG])
        streams.wait_for_events(1)
        with Upgrade("--served-model-name", "newer", env=run_env) as new:
            with Requests(old.url) as requests:
                new.wait_for("in place of")
                new.process.send_signal(signal.SIGSTOP)
                with Upgrade(env=run_env) as other:
                    assert other.wait() == 1
                    assert f"another engine upgrade (process {new.process.pid})" in other.log
                new.process.send_signal(signal.SIGCONT)
                # The supervisor that replaces this one hands the socket over.
                old.child("supervisor").kill()
                new.wait_for("ready at")
                assert f"ready at {old.url}" in new.log
                wait_until(lambda: models_at(old.url) == ["newer"], what="the new server answers")
                assert old.wait() == 0, old.log
                num_before = requests.num_answers
                wait_until(
                    lambda: requests.num_answers > num_before + 4, what="it goes on answering"
                )
            assert requests.failures == []
            again = Streams(old, [LONG])
            assert streams.answers() == again.answers()
            assert streams.streams[0].answer["done"]
            # The new server reads the blocks that the old one has computed.
            status, after = new.post("/v1/completions", kept)
            assert status == 200 and after["choices"][0]["text"] == before["choices"][0]["text"]
            assert new.metric("engine:kv_disk_hits_total") > 0
            assert new.stop() == 0


def test_a_successor_that_fails_leaves_the_old_server_alone(
    tiny_model: str, run_env: dict[str, str]
) -> None:
    with Server(tiny_model, "--dtype", "float32", env=run_env) as old:
        for arguments, complaint in (
            (["/nowhere/at/all"], "/nowhere/at/all"),
            (["--no-such-flag"], "--no-such-flag"),
            (["--kv-cache-memory-bytes", "1000"], "--kv-cache-memory-bytes"),
            (["--pid", "1"], "no running engine with process ID 1"),
            (["--port", "1"], "no running engine at :1"),
        ):
            with Upgrade(*arguments, env=run_env) as new:
                assert new.wait() in (1, 2)
                assert complaint in new.log
        assert old.process.poll() is None
        assert old.post("/v1/completions", {"prompt": [5], "max_tokens": 1})[0] == 200
        with Server(tiny_model, "--dtype", "float32", env=run_env) as other:
            with Upgrade(env=run_env) as new:
                assert new.wait() == 1
                assert f"--pid {old.process.pid}" in new.log
            assert other.stop() == 0


def test_connections_wait_while_servers_follow_each_other(
    tiny_model: str, run_env: dict[str, str], tmp_path: Path
) -> None:
    """The memory is too small for both servers.

    The test covers the background, a Unix socket, a service manager, and two upgrades.
    """
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(60)
    env = {**run_env, "NOTIFY_SOCKET": str(tmp_path / "notify")}
    path = str(tmp_path / "api")
    transport = httpx.HTTPTransport(uds=path)
    server = Server(tiny_model, "--dtype", "float32", "--uds", path, env=env, wait=False)
    client = httpx.Client(transport=transport, base_url="http://engine", timeout=60)
    with manager, client, server as old:
        assert manager.recv(1000).decode() == f"READY=1\nMAINPID={old.process.pid}"
        pids = [old.process.pid]
        for _ in range(2):
            with Upgrade("--overlap", "off", "--detach", env=env) as new:
                # It waits in the socket until the new server is ready.
                wait_until(lambda: "new connections wait" in new.log, what="the old one ends")
                answer = client.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
                assert answer.status_code == 200
                assert new.wait() == 0
            ready, pid = manager.recv(1000).decode().split("\nMAINPID=")
            assert ready == "READY=1"
            pids.append(int(pid))
        assert old.wait() == 0
        assert len(set(pids)) == 3
        last = psutil.Process(pids[-1])
        os.kill(last.pid, signal.SIGTERM)
        wait_until(lambda: has_ended(last), what="the last server stops")
        assert not Path(path).exists()


def test_detached_server_leaves_pipes_of_its_caller(
    tiny_model: str, run_env: dict[str, str], tmp_path: Path
) -> None:
    """A shell that reads the output of the command goes on; the log continues in that of the old server."""
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(60)
    env = {**run_env, "NOTIFY_SOCKET": str(tmp_path / "notify")}
    with manager, Server(tiny_model, "--dtype", "float32", env=env) as old:
        url = old.url
        manager.recv(1000)
        # This returns when the last process has closed both pipes.
        done = subprocess.run(
            [*COMMAND, "upgrade", "--detach"],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        new = psutil.Process(int(manager.recv(1000).decode().partition("MAINPID=")[2]))
        assert done.returncode == 0 and f"ready at {url}" in done.stderr
        wait_until(lambda: old.process.poll() is not None, what="the old server ends")
        assert httpx.get(f"{url}/health").status_code == 200
        new.send_signal(signal.SIGTERM)
        wait_until(lambda: has_ended(new), what="the new server stops")
        wait_until(lambda: old.log.count("draining for at most") == 1, what="its log is written")


def models_at(url: str) -> list[str]:
    """Return the names of the served models."""
    return [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]]
