"""A replica with several workers keeps them if its core crashes, and restarts all of them if one crashes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.checkpoints.tiny import mixture_directory, qwen3_directory
from support.processes.faults import ENVIRONMENT, fail
from support.processes.program import wait_until
from support.requests.mixed_streams import WITHOUT_LOGPROBS, Streams, bodies, undisturbed_answers
from support.servers.server import Server, assert_nothing_is_held

# No log-probabilities, because their last digits depend on the batch where torch multiplies.
REQUESTS = [{**body, **WITHOUT_LOGPROBS, "max_tokens": 200} for body in bodies(10)]


@pytest.fixture(scope="module")
def replicas(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], tuple[Server, list[dict[str, Any]]]]]:
    """Yield a server whose replica is divided by an option, and its answers without faults."""
    with ExitStack() as servers:

        @functools.cache
        def replica(option: str) -> tuple[Server, list[dict[str, Any]]]:
            make = mixture_directory if option == "-tp" else qwen3_directory
            path: Path = make(tmp_path_factory.mktemp("tiny"))[0]
            args = ("--dtype", "float32", option, "2", "--heartbeat-timeout", "3")
            server = Server(str(path), *args, "--kv-host-gib", "0.01", env=ENVIRONMENT)
            servers.enter_context(server)
            started.append(server)
            return server, undisturbed_answers(server, REQUESTS)

        started: list[Server] = []
        yield replica
        for server in started:
            assert server.stop() == 0, server.log


@pytest.fixture
def server(request: pytest.FixtureRequest, replicas) -> Server:
    """Return the replica divided by the option that a test names. Each crash happens with one of the two options."""
    found: Server = replicas(request.param)[0]
    return found


@pytest.fixture
def undisturbed(request: pytest.FixtureRequest, server: Server, replicas) -> list[dict[str, Any]]:
    option = request.node.callspec.params["server"]
    answers: list[dict[str, Any]] = replicas(option)[1]
    return answers


@pytest.mark.parametrize(
    ("server", "title", "harm", "cause"),
    [
        ("-tp", "worker 0", psutil.Process.kill, "worker 0 was killed by SIGKILL"),
        ("-tp", "worker 1", psutil.Process.suspend, "worker 1 sent no heartbeat"),
        ("-pp", "worker 1", fail, "worker 1: RuntimeError: a test asked for this failure"),
    ],
    indirect=["server"],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_streams_survive_and_the_error_names_the_first_crash(
    server: Server,
    undisturbed: list[dict[str, Any]],
    title: str,
    harm: Callable[[psutil.Process], None],
    cause: str,
) -> None:
    num_lines = len(server.output)
    streams = Streams(server, REQUESTS)
    streams.wait_for_events(50)
    before = {name: server.child(name) for name in ("core 0", "worker 0", "worker 1")}
    harm(before[title])
    wait_until(lambda: not any(p.is_running() for p in before.values()), what="all restarted")
    assert streams.answers() == undisturbed
    restarts = [line for line in server.output[num_lines:] if "restarting it" in line]
    assert cause in restarts[0]
    assert len(restarts) == 1, restarts
    assert_nothing_is_held(server)


def has_been_heard(server: Server) -> bool:
    Streams(server, REQUESTS[:1]).answers()
    processes = server.get("/engine/status")[1]["processes"]
    return next(p for p in processes if p["name"] == "core 0")["steps_per_s"] > 0


@pytest.mark.parametrize(
    ("server", "harm"),
    [("-tp", psutil.Process.kill), ("-tp", psutil.Process.suspend), ("-pp", fail)],
    indirect=["server"],
)
def test_workers_survive_a_core_crash(
    server: Server, undisturbed: list[dict[str, Any]], harm: Callable[[psutil.Process], None]
) -> None:
    workers = [server.child(name) for name in ("worker 0", "worker 1")]
    # A core that crashes before reporting a token also restarts its workers.
    wait_until(
        lambda: has_been_heard(server), what="steps of the core that the supervisor knows of"
    )
    streams = Streams(server, REQUESTS)
    streams.wait_for_events(50)
    core = server.child("core 0")
    harm(core)
    assert streams.answers() == undisturbed
    wait_until(lambda: not core.is_running(), what="the core is gone")
    assert_nothing_is_held(server)
    assert all(worker.is_running() for worker in workers)


@pytest.mark.parametrize("server", ["-pp"], indirect=True)
def test_a_core_without_a_writable_step_log_continues(
    server: Server, undisturbed: list[dict[str, Any]]
) -> None:
    core = server.child("core 0")
    streams = Streams(server, REQUESTS)
    streams.wait_for_events(50)
    core.rlimit(psutil.RLIMIT_FSIZE, (0, psutil.RLIM_INFINITY))
    assert streams.answers() == undisturbed
    assert core.is_running()
    core.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
    assert server.log.count("steps cannot be written") == 1
    assert_nothing_is_held(server)
