"""With a store, no stream is lost, wrong or generated twice, whoever is killed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.program import has_ended, wait_until
from support.returning_streams import ReturningStream, ReturningStreams
from support.server import Server, assert_nothing_is_held, default_model

ARGS = ("--device", "null", "--null-step-ms", "20", "--max-model-len", "512")

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"n": 2, "max_tokens": 50},
    {"stop": ["e", "zz"], "min_tokens": 30},
    {"seed": 7, "temperature": 0.7},
    {"max_tokens": 20},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
)
"""Most have no seed: the one that a frontend chose must survive as well."""


def bodies(count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"Chapter {number}. Once upon a time there",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 90,
            "ignore_eos": True,
            "temperature": 1.0,
            **KINDS[number % len(KINDS)],
        }
        for number in range(count)
    ]


class Engine:
    """A server that can be killed with all its processes, and started again on the same store."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_up = True
        self.server = self._start()

    def _start(self) -> Server:
        return Server(default_model(), *ARGS, "--store", str(self._path), "--api-server-count", "2")

    def find_url(self) -> str:
        return self.server.url if self._is_up else ""

    def kill_all(self) -> None:
        """Kill every process at once, and start another server."""
        processes = [*self.server.find_children(), psutil.Process(self.server.process.pid)]
        self._restart(processes)

    def kill_supervisor(self) -> None:
        """Kill the supervisor alone, whose children then exit, and start another server."""
        self._restart([psutil.Process(self.server.process.pid)])

    def _restart(self, victims: list[psutil.Process]) -> None:
        self._is_up = False
        for victim in victims:
            victim.kill()
        self.server.process.wait()
        with self.server:
            pass
        self.server = self._start()
        self._is_up = True

    def kill(self, title: str) -> None:
        """Kill one process, and wait until another one has taken its place."""
        victim = self.server.child(title)
        victim.kill()
        wait_until(lambda: has_ended(victim), what=f"{title} is gone")
        wait_until(lambda: self.server.child(title).pid != victim.pid, what="there is another one")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(tmp_path_factory.mktemp("store") / "store.db")
    try:
        yield engine
    finally:
        with engine.server as server:
            server.stop()
    assert "Traceback" not in server.log, server.log


def kill_frontend(engine: Engine) -> None:
    engine.kill("frontend 0")


def kill_both_frontends(engine: Engine) -> None:
    victims = [engine.server.child(f"frontend {index}") for index in range(2)]
    for victim in victims:
        victim.kill()


def kill_store(engine: Engine) -> None:
    engine.kill("store")


def kill_core_and_frontend(engine: Engine) -> None:
    engine.server.child("core 0").kill()
    engine.kill("frontend 1")


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "disturb",
    [
        kill_frontend,
        kill_store,
        kill_core_and_frontend,
        kill_both_frontends,
        Engine.kill_supervisor,
        Engine.kill_all,
    ],
    ids=lambda disturb: disturb.__name__,
)
def test_streams_of_returning_clients_are_complete(
    engine: Engine, disturb: Callable[[Engine], None]
) -> None:
    requests = bodies(12)
    name = f"{disturb.__name__} {time.time()}"
    streams = ReturningStreams(engine.find_url, requests, name)
    streams.wait_for_events(150)
    disturb(engine)
    ended = streams.join()
    assert [stream.problem for stream in ended] == [""] * len(ended), engine.server.log
    num_returns = sum(stream.num_returns for stream in ended)
    # Without the store, streams only pause.
    assert (num_returns == 0) == (disturb is kill_store)
    # Each client has read one request only, and all of it.
    assert all(len(stream.ids) == 1 for stream in ended)
    for stream in ended:
        assert read_again(engine.server, stream) == stream.texts
        if "stop" not in stream.body:
            assert stream.usage == stream.body["max_tokens"] * stream.body.get("n", 1)
    seeded = [stream for stream in ended if "seed" in stream.body]
    undisturbed = ReturningStreams(engine.find_url, [s.body for s in seeded], f"{name} again")
    assert [s.answer for s in undisturbed.join()] == [s.answer for s in seeded]
    assert_nothing_is_held(engine.server)


def read_again(server: Server, stream: ReturningStream) -> dict[int, str]:
    """Return the texts of a stream, read from its first event on."""
    [answer_id] = stream.ids
    status, text = server.get(f"/v1/completions/{answer_id}/events")
    assert status == 200, text
    texts: dict[int, str] = {}
    for line in text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts
