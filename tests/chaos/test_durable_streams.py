"""With a store, no stream is lost, wrong or generated twice, whichever process is killed."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from support.processes.program import has_ended, wait_until
from support.requests.plain_clients import PlainClient, wait_for_data
from support.requests.returning_streams import ReturningStream, ReturningStreams
from support.servers.durable_engine import DurableEngine
from support.servers.server import Server, assert_nothing_is_held, default_model

ARGS = ("--device", "null", "--null-step-ms", "20", "--max-model-len", "2048")

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"n": 2, "max_tokens": 50},
    {"stop": ["e", "zz"], "min_tokens": 30},
    {"seed": 7, "temperature": 0.7, "logprobs": 2, "logprob_token_ids": [5, 31, 260]},
    {"max_tokens": 20},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
)
"""Most have no seed: the one that a frontend chose must survive as well."""


def bodies(count: int, **changes: Any) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"Chapter {number}. Once upon a time there",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 90,
            "ignore_eos": True,
            "temperature": 1.0,
            **KINDS[number % len(KINDS)],
            **changes,
        }
        for number in range(count)
    ]


LONG = bodies(6, max_tokens=1600, seed=5)
"""Streams that take 32 seconds, longer than the start of a server on a busy machine."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DurableEngine]:
    # The path of a socket must be short. A separate directory hides the servers of other tests.
    with tempfile.TemporaryDirectory(prefix="run-", dir="/tmp") as run:
        path = tmp_path_factory.mktemp("store") / "store.db"
        engine = DurableEngine(path, run, default_model(), *ARGS)
        try:
            yield engine
        finally:
            with engine.server as server:
                server.stop()
    assert "Traceback" not in server.log, server.log


def kill_frontend(engine: DurableEngine) -> None:
    engine.kill("frontend 0")


def kill_both_frontends(engine: DurableEngine) -> None:
    victims = [engine.server.child(f"frontend {index}") for index in range(2)]
    for victim in victims:
        victim.kill()


def kill_store(engine: DurableEngine) -> None:
    engine.kill("store")


def kill_core_and_frontend(engine: DurableEngine) -> None:
    engine.server.child("core 0").kill()
    engine.kill("frontend 1")


@pytest.mark.parametrize(
    "disturb",
    [
        kill_frontend,
        kill_store,
        kill_core_and_frontend,
        kill_both_frontends,
        DurableEngine.kill_all,
        DurableEngine.kill_guardian,
        DurableEngine.kill_supervisor,
    ],
    ids=lambda disturb: disturb.__name__,
)
def test_streams_of_returning_clients_are_complete(
    engine: DurableEngine, disturb: Callable[[DurableEngine], None]
) -> None:
    requests = bodies(12)
    name = f"{disturb.__name__} {time.time()}"
    streams = ReturningStreams(engine.find_url, requests, name)
    streams.wait_for_events(150)
    disturb(engine)
    ended = streams.join()
    assert [stream.problem for stream in ended] == [""] * len(ended), engine.server.log
    num_returns = sum(stream.num_returns for stream in ended)
    # As long as the store or the guardian lives, streams only pause. Without a supervisor, they do not even pause.
    ends_connections = disturb in (DurableEngine.kill_all, DurableEngine.kill_guardian)
    assert (num_returns > 0) == ends_connections
    # Each client has read only one request, completely.
    assert all(len(stream.ids) == 1 for stream in ended)
    for stream in ended:
        assert read_again(engine.server, stream) == stream.texts
        if "stop" not in stream.body:
            assert stream.usage == stream.body["max_tokens"] * stream.body.get("n", 1)
    seeded = [stream for stream in ended if "seed" in stream.body]
    undisturbed = ReturningStreams(engine.find_url, [s.body for s in seeded], f"{name} again")
    assert [s.answer for s in undisturbed.join()] == [s.answer for s in seeded]
    assert_nothing_is_held(engine.server)


def test_no_stream_is_lost_while_servers_that_share_a_store_follow_each_other(
    engine: DurableEngine,
) -> None:
    with engine.upgrade() as old:
        streams = ReturningStreams(engine.find_url, LONG, f"1 {time.time()}")
        response = Background(old, max_output_tokens=1600)
        streams.wait_for_events(6)
        engine.server.wait_for("ready at")
        later = ReturningStreams(engine.find_url, bodies(6), f"2 {time.time()}")
        later.wait_for_events(6)
        # The new server has the old server's running and finished requests.
        found = [read_again(engine.server, stream) for stream in streams.streams]
        undisturbed = streams.join()
        assert old.wait() == 0, old.log
    ended = [*undisturbed, *later.join()]
    assert [(stream.problem, stream.num_returns) for stream in ended] == [("", 0)] * 12
    assert found == [stream.texts for stream in undisturbed]
    assert [read_again(engine.server, stream) for stream in ended] == [s.texts for s in ended]
    output = response.read(engine.server)

    with engine.upgrade() as old:
        streams = ReturningStreams(engine.find_url, LONG, f"3 {time.time()}")
        response = Background(old, max_output_tokens=1600)
        streams.wait_for_events(6)
        engine.server.wait_for("ready at")
        for server in (old, engine.server):
            store = server.child("store")
            store.kill()
            wait_until(lambda store=store: has_ended(store), what="a store is gone")
            streams.wait_for_events(60)
            assert not any(stream.num_returns for stream in streams.streams)
        psutil.Process(old.process.pid).kill()
        ended = streams.join()
        old.process.wait()
    assert any(stream.num_returns for stream in ended)
    assert [stream.answer for stream in ended] == [stream.answer for stream in undisturbed]
    # The new server has continued the response with the same tokens.
    assert response.read(engine.server) == output
    assert_nothing_is_held(engine.server)


MESSAGES = [{"role": "user", "content": "Once upon a time"}]

STREAMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": MESSAGES, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": "Once", "n": 2}),
    ("/v1/messages", {"messages": MESSAGES, "model": "default"}),
    ("/api/chat", {"messages": MESSAGES, "model": "default"}),
    ("/v1/responses", {"input": "Once", "max_output_tokens": 200}),
    ("/completion", {"prompt": "Once", "n_predict": 200}),
)


def start_plain_clients(engine: DurableEngine) -> tuple[list[PlainClient], list[PlainClient]]:
    """Start clients of streams, and clients of whole answers."""
    url = engine.find_url()
    assert url is not None
    sampling = {"max_tokens": 200, "seed": 3, "ignore_eos": True}
    options = {"options": {"num_predict": 200, "seed": 3}}

    def start(path: str, body: dict[str, Any], *, stream: bool) -> PlainClient:
        given = options if path.startswith("/api") else sampling
        asked = {**given, **body, "stream": stream}
        if not stream:
            asked.pop("stream_options", None)
        return PlainClient(url, path, asked)

    streams = [start(path, body, stream=True) for path, body in STREAMS for _ in range(2)]
    whole = [start(path, body, stream=False) for path, body in STREAMS if "n" not in body]
    return streams, whole


def test_clients_that_do_not_return_do_not_notice_that_frontends_are_killed(
    engine: DurableEngine,
) -> None:
    streams, whole = start_plain_clients(engine)
    for num_bytes in (2000, 5000, 9000):
        wait_for_data(streams, num_bytes)
        kill_both_frontends(engine)
        # These requests wait in the connections, and must not be answered within the streams.
        for client in streams[::2]:
            client.send_another()
    disturbed = [*streams, *whole]
    for client in disturbed:
        client.join()
    assert [client.problem for client in disturbed] == [""] * len(disturbed), engine.server.log
    streams, whole = start_plain_clients(engine)
    undisturbed = [*streams, *whole]
    for client in undisturbed:
        client.join()
    assert [*map(comparable, disturbed)] == [*map(comparable, undisturbed)]
    assert_nothing_is_held(engine.server)
    wait_until(lambda: num_sockets(engine.server) == 0, what="the store holds no connection")


def comparable(client: PlainClient) -> Any:
    """Return the answer; without its text if the request could not have a seed."""
    if client.path == "/v1/messages":
        ends = (b'"output_tokens":200', b'"type":"message_stop"', b'"type":"message_start"')
        return client.problem, [client.data.count(end) for end in ends]
    return client.answer


def num_sockets(server: Server) -> int:
    """Return the number of TCP connections that the store process has open."""
    return len(server.child("store").net_connections("tcp"))


class Background:
    """A response that runs in the background."""

    def __init__(self, server: Server, max_output_tokens: int) -> None:
        body = {
            "input": "Once",
            "background": True,
            "seed": 3,
            "max_output_tokens": max_output_tokens,
            "ignore_eos": True,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
        }
        status, response = server.post("/v1/responses", body)
        assert status == 200, response
        self._path = f"/v1/responses/{response['id']}"

    def read(self, server: Server) -> list[Any]:
        """Return the status and the content when the response has ended."""
        found: dict[str, Any] = {}

        def has_ended() -> bool:
            _, response = server.get(self._path)
            found.update(response)
            return response["status"] not in ("queued", "in_progress")

        wait_until(has_ended, what="the response has ended")
        assert found["error"] is None, found
        return [found["status"], [item["content"] for item in found["output"]]]


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
