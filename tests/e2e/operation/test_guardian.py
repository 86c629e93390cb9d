"""A supervisor that crashes or hangs is replaced, its processes are adopted, and clients do not notice."""

from __future__ import annotations

import json
import signal
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from engine.frontend.supervisor.saved_state import NAME, StateFile
from support.processes.program import has_ended, wait_until
from support.servers.server import Server, assert_nothing_is_held, default_model, title_of

NULL = (default_model(), "--device", "null", "--null-step-ms", "10")


class Reader(threading.Thread):
    """A client that reads one stream and counts its tokens."""

    def __init__(self, server: Server, num_tokens: int) -> None:
        super().__init__()
        body = {
            "prompt": "Once upon a time",
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        self._request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        self.num_tokens = 0
        self.is_done = False
        self.start()

    def run(self) -> None:
        with urllib.request.urlopen(self._request, timeout=60) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    self.num_tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                self.is_done |= line.startswith(b"data: [DONE]")


def kill(server: Server, title: str, signum: int = signal.SIGKILL) -> None:
    """Send the signal to the process, and wait until there is another one in its place."""
    process = server.child(title)
    process.send_signal(signum)
    wait_until(lambda: has_ended(process), what=f"{title} is gone")
    wait_until(lambda: server.child(title).pid != process.pid, what=f"there is another {title}")


@pytest.mark.timeout(120)
def test_streams_are_not_cut_when_supervisors_are_killed(tmp_path: Path) -> None:
    with Server(
        *NULL,
        *("--kv-cache-memory-bytes", "64M", "--heartbeat-timeout", "3"),
        env={"XDG_RUNTIME_DIR": str(tmp_path)},
    ) as server:
        readers = [Reader(server, 600) for _ in range(4)]
        wait_until(lambda: all(reader.num_tokens > 20 for reader in readers), what="tokens")
        before = {title: server.child(title).pid for title in ("core 0", "frontend 0", "store")}
        kill(server, "supervisor")
        assert before == {title: server.child(title).pid for title in before}
        # Streams go on while a supervisor hangs, until it is replaced.
        num_tokens = readers[0].num_tokens
        kill(server, "supervisor", signal.SIGSTOP)
        assert readers[0].num_tokens > num_tokens + 50
        assert "the supervisor sent no heartbeat for 3 s, and was killed" in server.log
        assert before == {title: server.child(title).pid for title in before}
        # The new supervisor restarts an adopted process that crashes, and one that crashes together with it.
        server.child("core 0").kill()
        wait_until(lambda: server.child("core 0").pid != before["core 0"], what="another core")
        worker = server.child("worker 0")
        worker.kill()
        kill(server, "supervisor")
        for reader in readers:
            reader.join()
        assert [(reader.is_done, reader.num_tokens) for reader in readers] == [(True, 600)] * 4
        server.wait_until_whole()
        assert_nothing_is_held(server)
        processes = [psutil.Process(server.process.pid), *server.find_children()]
        assert server.stop() == 0
        assert all(map(has_ended, processes))
        assert list(tmp_path.rglob("*")) == []


@pytest.mark.timeout(120)
def test_a_start_goes_on_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    with Server(*NULL, env={"XDG_RUNTIME_DIR": str(tmp_path)}, wait=False) as server:
        core = server.child("core 0")
        # A process that the supervisor has not saved yet is started again. Its files exist before the first state.
        wait_until(
            lambda: any(StateFile(file.parent).load() for file in tmp_path.rglob(f"{NAME}.*")),
            what="a saved state",
        )
        kill(server, "supervisor")
        server.wait_for("ready at")
        assert server.log.count("ready at") == 1
        assert server.child("core 0").pid == core.pid
        # A signal reaches the supervisor of that moment.
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("disturb", [psutil.Process.kill, psutil.Process.suspend])
def test_processes_are_restarted_without_a_fork_server(
    disturb: Callable[[psutil.Process], None],
) -> None:
    with Server(*NULL, "--heartbeat-timeout", "3") as server:
        lost = fork_servers_of(server)
        for child in lost:
            disturb(child)
        for title in ("core 0", "frontend 0", "store"):
            kill(server, title)
        server.wait_until_whole()
        wait_until(
            lambda: len(set(fork_servers_of(server)) - set(lost)) == len(lost), what="fork servers"
        )
        wait_until(lambda: is_forked_after_restart(server), what="a fork by another fork server")
        processes = [psutil.Process(server.process.pid), *server.find_children()]
        assert server.stop() == 0
        assert all(map(has_ended, processes))


def is_forked_after_restart(server: Server) -> bool:
    """Kill the core, and return whether a fork server has forked the next one, as a child of the guardian.

    The core serves a request before, since a server stops whose core crashes again and again without serving any.
    """
    reader = Reader(server, 20)
    reader.join()
    assert reader.num_tokens == 20
    kill(server, "core 0")
    server.wait_until_whole()
    return server.child("core 0").ppid() == server.process.pid


def fork_servers_of(server: Server) -> list[psutil.Process]:
    return [child for child in server.find_children() if title_of(child) == "fork server"]
