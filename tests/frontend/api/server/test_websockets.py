"""WebSockets: handshakes, frames, limits and shutdown; and OpenAI's Responses API on them."""

from __future__ import annotations

import json
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import openai
import pytest
from engine.frontend.http.access import digest_of
from engine.frontend.http.client_secrets import write_secret
from engine.protocol.process import STOP_PROCESS
from support.processes.program import wait_until
from support.servers.frontend_process import MODEL, FrontendProcess, sound_frontend
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

ENDINGS = ("response.completed", "response.incomplete", "response.failed", "error")
PATH = "/v1/responses"
KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
CLOSE = b"\x88"


def open_socket(frontend: FrontendProcess, path: str = PATH, **options: Any) -> ClientConnection:
    options.setdefault("max_size", None)
    return connect(f"ws://127.0.0.1:{frontend.port}{path}", **options)


def read_turn(client: ClientConnection) -> list[dict[str, Any]]:
    """Return the events of one response."""
    events = [json.loads(client.recv(20))]
    while events[-1]["type"] not in ENDINGS:
        events.append(json.loads(client.recv(20)))
    return events


def event_of(text: str, **fields: Any) -> str:
    """Return an event whose response repeats the text, which has one token for each word."""
    length = {"max_output_tokens": len(text.split())}
    return json.dumps(
        {"type": "response.create", "model": MODEL, "input": text, **length, **fields}
    )


def create(client: ClientConnection, text: str, **fields: Any) -> dict[str, Any]:
    """Return the last event of a response."""
    client.send(event_of(text, **fields))
    return read_turn(client)[-1]


def kinds_of(events: list[dict[str, Any]]) -> list[str]:
    return [kind for kind, _ in groupby(event["type"] for event in events)]


def text_of(event: dict[str, Any]) -> str:
    [item] = event["response"]["output"]
    return item["content"][0]["text"]


def close_code(client: ClientConnection) -> int | None:
    """Return the code with which the server closes the WebSocket."""
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            client.recv(20)
    return closed.value.rcvd and closed.value.rcvd.code


@contextmanager
def raw_socket(frontend: FrontendProcess, *headers: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", frontend.port), 20) as connection:
        lines = [b"GET /v1/responses HTTP/1.1", b"host: localhost", b"upgrade: websocket"]
        lines += [b"connection: Upgrade", b"sec-websocket-version: 13", *headers]
        connection.sendall(b"\r\n".join([*lines, b"sec-websocket-key: " + KEY, b"\r\n"]))
        assert connection.recv(4096).startswith(b"HTTP/1.1 101 ")
        yield connection


def raw_close_code(connection: socket.socket) -> int:
    data = b""
    while not data.startswith(CLOSE) or len(data) < 4:
        data += connection.recv(4096)
    return struct.unpack("!H", data[2:4])[0]


def frame(kind: int, data: bytes = b"", *, is_last: bool = True) -> bytes:
    """Return a frame whose mask changes nothing."""
    assert len(data) < 126
    return bytes([is_last << 7 | kind, 0x80 | len(data)]) + bytes(4) + data


def test_a_response_has_the_same_events_as_a_stream(frontend: FrontendProcess) -> None:
    body = json.loads(event_of("one two three", store=False, stream=True))
    answer = frontend.http.post(PATH, json=body)
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    expected = [json.loads(line[6:]) for line in lines]
    with open_socket(frontend) as client:
        client.send(json.dumps(body))
        found = read_turn(client)
    # How many deltas a text has depends on the time.
    assert kinds_of(found) == kinds_of(expected)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert text_of(found[-1]) == text_of(expected[-1])
    assert found[-1]["response"]["usage"] == expected[-1]["response"]["usage"]


def test_openais_client_continues_a_response_that_is_not_stored(client: openai.OpenAI) -> None:
    with client.responses.connect() as connection:
        texts, previous = [], None
        for text in ("good morning", "good evening", "good night"):
            connection.response.create(
                model=MODEL,
                input=text,
                max_output_tokens=2,
                store=False,
                previous_response_id=previous,
            )
            for event in connection:
                if event.type in ENDINGS:
                    break
            assert event.type == "response.incomplete", event
            previous = event.response.id
            texts.append(event.response.output_text)
        assert texts == ["good morning", "good evening", "good night"]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(previous)


def test_only_the_latest_responses_are_kept(frontend: FrontendProcess) -> None:
    with open_socket(frontend) as client, open_socket(frontend) as other:
        ids = [create(client, "a b", store=False)["response"]["id"] for _ in range(6)]
        for each in (client, other):
            event = create(each, "c", previous_response_id=ids[0])
            assert event["type"] == "error"
            assert event["error"]["code"] == "previous_response_not_found"
        event = create(client, "c d", previous_response_id=ids[-1])
        assert text_of(event) == "c d"
        counted = event["response"]["usage"]["input_tokens"]
        assert counted == create(client, "c d")["response"]["usage"]["input_tokens"]
        reference = {"type": "item_reference", "id": event["response"]["output"][0]["id"]}
        assert text_of(create(client, "", input=[reference], max_output_tokens=2)) == "c d"


def test_a_response_without_output_prepares_the_next(frontend: FrontendProcess) -> None:
    with open_socket(frontend) as client:
        client.send(event_of("a b c d", store=False, generate=False, min_tokens=5))
        events = read_turn(client)
        assert kinds_of(events) == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        response = events[-1]["response"]
        assert response["output"] == [] and response["usage"]["output_tokens"] == 0
        next_event = create(client, "e f", previous_response_id=response["id"])
        assert text_of(next_event) == "e f"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (b'{"type": "response.create", "background": true, "input": "x"}', "background"),
        (b'{"type": "response.create", "stream_id": "a", "input": "x"}', "stream_id"),
        (b'{"type": "response.create", "model": "none", "input": "x"}', "model"),
        (b'{"type": "response.create", "generate": 7, "input": "x"}', "generate"),
        (b'{"type": "response.create"}', "input"),
        (b'{"type": "response.cancel"}', "type"),
        (b'{"type": 7}', "type"),
        (b'{"type": ["response.create"]}', "type"),
        (b"[]", None),
        (b"[" * 10_000, None),
        (b'{"type": "response.create"', None),
        (b"", None),
    ],
)
def test_invalid_events_are_answered_and_leave_the_websocket_open(
    frontend: FrontendProcess, message: bytes, param: str | None
) -> None:
    with open_socket(frontend) as client:
        client.send(message.decode())
        [event] = read_turn(client)
        assert event["type"] == "error" and 400 <= event["status"] < 500
        assert event["error"]["message"] and event["error"]["param"] == param
        assert text_of(create(client, "still here")) == "still here"


def test_other_events_are_answered_while_a_response_is_written(frontend: FrontendProcess) -> None:
    with open_socket(frontend) as client:
        client.send(event_of("word " * 100))
        client.send('{"type": "response.processed", "response_id": "resp_1"}')
        client.send('{"type": "response.steer", "previous_response_id": "r", "input": "no"}')
        events = read_turn(client)
    [refusal] = [event for event in events if event["type"] == "response.steer.failed"]
    assert refusal["error"]["code"] == "steering_not_supported"
    assert refusal["steer"] == {"previous_response_id": "r", "input": "no"}
    assert events[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x81\x02{}", 1002),
        (frame(0x41), 1002),
        (frame(3), 1002),
        (frame(0, b"x"), 1002),
        (frame(1, b"x", is_last=False) + frame(1, b"y"), 1002),
        (frame(9, b"x", is_last=False), 1002),
        (frame(8, struct.pack("!H", 999)), 1002),
        (frame(2, b"x"), 1003),
        (frame(1, b"\xff"), 1007),
        (frame(1, b"\xe2", is_last=False) + frame(0, b"\x82"), 1007),
        (b"\x81\xff" + struct.pack("!Q", 2**62) + bytes(4), 1009),
        (frame(8, struct.pack("!H", 1000)), 1000),
        (frame(1, is_last=False) + frame(0, is_last=False) * 20_000 + frame(3), 1002),
    ],
)
def test_malformed_frames_close_the_websocket_with_the_right_code(
    frontend: FrontendProcess, data: bytes, code: int
) -> None:
    with raw_socket(frontend) as connection:
        connection.sendall(data)
        assert raw_close_code(connection) == code
    assert frontend.complete("a b", max_tokens=2)["choices"][0]["text"]


def test_requests_that_are_no_handshakes_are_refused(frontend: FrontendProcess) -> None:
    offer = {"upgrade": "websocket", "connection": "Upgrade", "sec-websocket-version": "13"}
    key = {"sec-websocket-key": KEY.decode()}
    for headers, status in (
        ({}, 426),
        (key | offer | {"sec-websocket-version": "8"}, 426),
        (key | offer | {"upgrade": "h2c"}, 426),
        (offer, 400),
        (offer | {"sec-websocket-key": "eHg="}, 400),
        (key | offer | {"origin": "https://evil.example"}, 403),
        (key | offer | {"host": "evil.example"}, 403),
    ):
        answer = frontend.http.get(PATH, headers=headers)
        assert answer.status_code == status, (headers, answer.text)
        assert answer.json()["error"]["message"]
        if status == 426:
            assert answer.headers["sec-websocket-version"] == "13"
    # Other routes ignore the offer.
    assert frontend.http.get("/v1/models", headers=key | offer).status_code == 200


def test_websockets_need_an_api_key() -> None:
    with sound_frontend(api_keys=("secret", "other")) as frontend:
        bearer = {"Authorization": "Bearer secret"}
        for options in ({}, {"additional_headers": {"Authorization": "Bearer wrong"}}):
            with pytest.raises(InvalidStatus) as refused:
                open_socket(frontend, **options)
            assert refused.value.response.status_code == 401
        # Web pages cannot set headers.
        names = ["realtime", "openai-insecure-api-key.secret"]
        with open_socket(frontend, subprotocols=names) as client:
            assert client.subprotocol == "realtime"
            stored = create(client, "a b")["response"]["id"]
        with open_socket(frontend, additional_headers=bearer) as client:
            assert text_of(create(client, "c", previous_response_id=stored)) == "c"
        with open_socket(frontend, additional_headers={"x-api-key": "other"}) as client:
            assert create(client, "c", previous_response_id=stored)["status"] == 400


def test_client_secrets_open_realtime_sessions_until_they_expire() -> None:
    key = digest_of(b"secret")
    now = int(time.time())
    with sound_frontend(api_keys=("other", "secret")) as frontend:
        for secret, path, status in (
            (write_secret(key, now + 60, b""), "/v1/realtime", 400),
            (write_secret(key, now - 1, b""), "/v1/realtime", 401),
            (write_secret(digest_of(b"wrong"), now + 60, b""), "/v1/realtime", 401),
            (write_secret(key, now + 60, b"")[:-3] + "zzz", "/v1/realtime", 401),
            ("ek_", "/v1/realtime", 401),
            ("ek_\u00e9=", "/v1/realtime", 401),
            (write_secret(key, now + 60, b""), PATH, 401),
        ):
            with pytest.raises(InvalidStatus) as refused:
                open_socket(frontend, path, additional_headers={"x-api-key": secret})
            # This model does not transcribe.
            assert refused.value.response.status_code == status


def test_the_request_of_a_closed_websocket_is_aborted() -> None:
    with sound_frontend(step_s=0.05) as frontend:
        client = open_socket(frontend)
        client.send(event_of("word " * 300))
        client.send(event_of("never answered"))
        wait_until(lambda: bool(frontend.core.requests), what="it runs")
        client.close()
        wait_until(lambda: not frontend.core.requests, what="it is aborted")


def test_clients_that_are_slow_or_silent_are_disconnected() -> None:
    with (
        sound_frontend(slow_client_s=1.0) as frontend,
        raw_socket(frontend) as slow,
        raw_socket(frontend) as silent,
        open_socket(frontend) as idle,
    ):
        slow.sendall(frame(1, b"{", is_last=False))
        # It reads nothing but pings, which it does not answer.
        began = time.monotonic()
        data = b""
        while CLOSE not in data:
            data += silent.recv(4096)
        assert data.startswith(b"\x89\x00") and data[data.index(CLOSE) + 2 :][:2] == b"\x03\xf3"
        assert time.monotonic() - began < 15
        data = b""
        while CLOSE not in data:
            data += slow.recv(4096)
        assert struct.unpack("!H", data[data.index(CLOSE) + 2 :][:2])[0] == 1008
        assert text_of(create(idle, "still here")) == "still here"


def test_a_client_that_does_not_read_is_disconnected() -> None:
    with (
        sound_frontend(slow_client_s=1.0, send_buffer=4096, max_model_len=8192) as frontend,
        raw_socket(frontend) as connection,
    ):
        message = event_of("word " * 8000).encode()
        connection.sendall(b"\x81\xfe" + struct.pack("!H", len(message)) + bytes(4) + message)
        wait_until(lambda: bool(frontend.core.requests), what="it runs")
        wait_until(lambda: not frontend.core.requests, 30, what="it is aborted")


def test_messages_beyond_the_memory_for_large_requests_are_refused() -> None:
    limits = {"max_body_bytes": 1 << 20, "max_request_memory": 1 << 20}
    with sound_frontend(**limits) as frontend, open_socket(frontend) as client:
        event = create(client, "x", instructions="y" * 2_000)
        assert event["type"] == "response.incomplete"
        with open_socket(frontend) as large:
            large.send(event_of("x" * (1 << 20)))
            assert close_code(large) == 1009
        with raw_socket(frontend) as first, raw_socket(frontend) as second:
            head = b"\x81\xff" + struct.pack("!Q", 1_000_000) + bytes(4)
            for connection in (first, second):
                connection.sendall(head + b" " * 900_000)
            # The first to exceed the memory is refused, and then the other fits.
            refused, _, _ = select.select([first, second], [], [], 20)
            assert [raw_close_code(connection) for connection in refused] == [1013]
        assert text_of(create(client, "still here")) == "still here"


@pytest.mark.parametrize(("number", "code"), [(STOP_PROCESS, 1001), (signal.SIGUSR1, 1012)])
def test_shutdown_and_upgrades_end_websockets_after_their_answer(
    number: signal.Signals, code: int
) -> None:
    with sound_frontend(step_s=0.01) as frontend:
        text = "word " * 200
        with open_socket(frontend) as idle, open_socket(frontend) as busy:
            busy.send(event_of(text))
            assert json.loads(busy.recv(20))["type"] == "response.created"
            frontend.process.send_signal(number)
            assert close_code(idle) == code
            assert text_of(read_turn(busy)[-1]).split() == text.split()
            assert close_code(busy) == code
        assert frontend.process.wait(20) == 0, frontend.log
