"""Streams are unchanged by a crash or hang of any process."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from support.checkpoints.shallow_model import shallow_model
from support.processes.faults import ENVIRONMENT, exhaust_memory, fail
from support.processes.program import wait_until
from support.requests.mixed_streams import Streams, bodies, undisturbed_answers
from support.servers.server import Server, assert_nothing_is_held
from websockets.sync.client import connect

REQUESTS = bodies(10)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    args = ("--max-model-len", "512", "--heartbeat-timeout", "3", "--api-server-count", "2")
    with Server(shallow_model(), *args, env=ENVIRONMENT) as server:
        yield server
        assert server.stop() == 0, server.log


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[dict[str, Any]]:
    return undisturbed_answers(server, REQUESTS)


@pytest.mark.parametrize(
    ("title", "disturb"),
    [
        ("core 0", psutil.Process.kill),
        ("core 0", psutil.Process.suspend),
        ("core 0", fail),
        ("worker 0", psutil.Process.suspend),
        ("worker 0", psutil.Process.kill),
        ("worker 0", fail),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_streams_are_unchanged_by_a_crash_or_hang(
    server: Server,
    undisturbed: list[dict[str, Any]],
    title: str,
    disturb: Callable[[psutil.Process], None],
) -> None:
    victim = server.child(title)
    streams = Streams(server, REQUESTS)
    streams.wait_for_events(50)
    disturb(victim)
    assert streams.answers() == undisturbed
    wait_until(lambda: not victim.is_running(), what=f"{title} is gone")
    assert_nothing_is_held(server)


@pytest.mark.parametrize("title", ["core 0", "worker 0"])
def test_a_websocket_continues_its_response_after_a_crash(server: Server, title: str) -> None:
    fields = {"input": "Tell me a story.", "temperature": 0, "max_output_tokens": 100}
    message = json.dumps({"type": "response.create", "store": False, "ignore_eos": True, **fields})
    texts: list[str] = []
    with connect(server.url.replace("http", "ws", 1) + "/v1/responses") as socket:
        for victim in (None, server.child(title)):
            socket.send(message)
            texts.append("")
            while (event := json.loads(socket.recv(60)))["type"] != "response.incomplete":
                if event["type"] == "response.output_text.delta":
                    if victim is not None and not texts[-1]:
                        victim.kill()
                    texts[-1] += event["delta"]
    assert texts[0] and texts[0] == texts[1]
    server.wait_until_whole()


def test_a_core_continues_the_streams_of_its_predecessor() -> None:
    prompts = [f"Part {number}. " + "It was a bright cold day. " * 40 for number in range(6)]
    story = {"stream": True, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    # Places for drafts count as scheduled, and a frontend learns the counts of another one with a delay.
    flags = ("--speculative-config", '{"num_speculative_tokens": 0}', "--api-server-count", "1")
    with Server(shallow_model(), "--max-model-len", "512", *flags, env=ENVIRONMENT) as server:
        victim = server.child("core 0")
        streams = Streams(server, [{"prompt": prompt, **story} for prompt in prompts])
        # A prompt that is computed only in part would be computed again.
        wait_until(
            lambda: min(stream.num_events for stream in streams.streams) > 10,
            what="ten events of every stream",
        )
        victim.kill()
        for answer in streams.answers():
            assert "done" in answer and "error" not in answer, answer
        scheduled = server.metric("engine:scheduled_tokens_total")
        num_prompt_tokens = server.metric("engine:prompt_tokens_total")
        asked_for = num_prompt_tokens + server.metric("engine:generation_tokens_total")
        # Each stream recomputes only the one or two tokens that no client received, not three hundred.
        assert num_prompt_tokens < scheduled < asked_for + 20 * len(prompts)
        assert_nothing_is_held(server)
        assert server.stop() == 0, server.log


LONG_PROMPTS = [{**body, "prompt": "Once upon a time. " * 80} for body in REQUESTS[:4]]


@pytest.fixture(scope="module")
def undisturbed_long(server: Server) -> list[dict[str, Any]]:
    return undisturbed_answers(server, LONG_PROMPTS)


@pytest.mark.parametrize("title", ["core 0", "worker 0", "frontend 0"])
def test_a_process_that_cannot_allocate_memory_is_replaced_or_continues(
    server: Server,
    undisturbed: list[dict[str, Any]],
    undisturbed_long: list[dict[str, Any]],
    title: str,
) -> None:
    streams = Streams(server, REQUESTS)
    streams.wait_for_events(20)
    victim = server.child(title)
    exhaust_memory(victim)
    provoked = Streams(server, LONG_PROMPTS)
    answers, provoked_answers = streams.answers(), provoked.answers()
    if victim.is_running():
        victim.kill()
    wait_until(lambda: server.get("/readyz")[0] == 200, 40, what="ready again")
    assert_nothing_is_held(server)
    assert Streams(server, REQUESTS).answers() == undisturbed
    expected = undisturbed + undisturbed_long
    for answer, right in zip(answers + provoked_answers, expected, strict=True):
        is_cut = title == "frontend 0" and ("connection" in answer or "error" in answer)
        assert answer == right or is_cut, answer


def test_a_second_core_may_crash_before_the_first_is_replaced(
    server: Server, undisturbed: list[dict[str, Any]]
) -> None:
    streams = Streams(server, REQUESTS)
    for _ in range(3):
        streams.wait_for_events(30)
        server.child("core 0").kill()
    assert streams.answers() == undisturbed
    assert_nothing_is_held(server)


def test_connections_wait_for_restarted_frontends(
    server: Server, undisturbed: list[dict[str, Any]]
) -> None:
    victims = [server.child("frontend 0"), server.child("frontend 1")]
    for victim in victims:
        victim.kill()
    wait_until(lambda: not any(v.is_running() for v in victims), what="the frontends are gone")
    assert Streams(server, REQUESTS).answers() == undisturbed
    assert_nothing_is_held(server)


def num_connections(frontend: psutil.Process) -> int:
    return sum(c.status == psutil.CONN_ESTABLISHED for c in frontend.net_connections("tcp"))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=lambda s: s.name)
def test_a_frontend_crash_closes_only_its_own_connections(
    server: Server, undisturbed: list[dict[str, Any]], signum: signal.Signals
) -> None:
    server.wait_until_whole()
    streams = Streams(server, REQUESTS)
    streams.wait_until_all_run()
    # The frontend that wakes up first may have accepted most of the connections.
    title = min(
        ("frontend 0", "frontend 1"), key=lambda title: num_connections(server.child(title))
    )
    victim = server.child(title)
    most_cut = num_connections(victim)
    victim.send_signal(signum)
    answers = streams.answers()
    cut = [index for index, answer in enumerate(answers) if "done" not in answer]
    assert len(cut) <= most_cut < len(REQUESTS)
    for index, answer in enumerate(answers):
        if index not in cut:
            assert answer == undisturbed[index]
    wait_until(lambda: not victim.is_running(), what="the frontend is gone")
    wait_until(lambda: server.child(title).is_running(), what="there is another one")
    server.wait_until_whole()
    # The children of the frontend ended, too, and an exit that nobody reads would end each wait of the supervisor.
    supervisor = server.child("supervisor")
    states = []
    for _ in range(100):
        states.append(supervisor.status())
        time.sleep(0.01)
    assert statistics.mode(states) == psutil.STATUS_SLEEPING
    assert_nothing_is_held(server)
    assert Streams(server, REQUESTS).answers() == undisturbed


def test_an_exception_in_a_frontend_ends_at_most_one_stream(
    server: Server, undisturbed: list[dict[str, Any]]
) -> None:
    server.wait_until_whole()
    streams = Streams(server, REQUESTS)
    streams.wait_for_events(40)
    victim = server.child("frontend 0")
    ports = {c.raddr.port for c in victim.net_connections("tcp") if c.raddr}
    fail(victim)
    answers = streams.answers()
    hurt = [index for index, answer in enumerate(answers) if answer != undisturbed[index]]
    assert len(hurt) <= 1, [answers[index] for index in hurt]
    assert all(streams.streams[index].port in ports for index in hurt)
    assert_nothing_is_held(server)
    # The exception may have ended a task that is needed only later.
    victim.kill()
    wait_until(lambda: not victim.is_running(), what="the frontend is gone")


def test_a_frontend_becomes_ready_while_another_fails(server: Server) -> None:
    server.wait_until_whole()
    victim = server.child("frontend 0")
    victim.suspend()

    def is_replaced() -> bool:
        status, health = server.get("/readyz")
        # On a slow machine, the new frontend answers before it is ready.
        assert status == 200 or health["stage"] != "ready", health
        processes = server.get("/engine/status")[1]["processes"]
        stages = {process["pid"]: process["stage"] for process in processes}
        return not victim.is_running() and stages.get(server.child("frontend 0").pid) == "ready"

    wait_until(is_replaced, 40, what="there is another one")


def test_health_names_a_hanging_process_until_it_is_replaced(server: Server) -> None:
    server.wait_until_whole()
    victim = server.child("worker 0")
    victim.suspend()

    def is_named() -> bool:
        code, health = server.get("/health")
        return code == 503 and "worker 0: silent for" in health["detail"]

    wait_until(is_named, what="health names it")
    assert server.get("/livez")[0] == 200
    wait_until(lambda: server.get("/readyz")[0] == 200, 40, what="ready again")
    assert not victim.is_running()
    server.wait_until_whole()
    processes = {
        process["name"]: process for process in server.get("/engine/status")[1]["processes"]
    }
    assert set(processes) == {"frontend 0", "frontend 1", "store", "core 0", "worker 0"}
    assert {process["stage"] for process in processes.values()} == {"ready"}
    worker = processes["worker 0"]
    assert worker["pid"] == server.child("worker 0").pid
    assert worker["num_restarts"] > 0
    assert worker["epoch"] == processes["core 0"]["epoch"]
    table = subprocess.run(
        [sys.executable, "-m", "engine.frontend.cli.main", "status", "--url", server.url],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert table.returncode == 0, table.stderr
    rows = table.stdout.splitlines()[1:]
    assert all(row.startswith(f"{name} ") for row, name in zip(rows, processes, strict=True)), rows
