"""Attacks below the body: framing, headers, hosts, origins, content types, slowness and numbers of connections."""

from __future__ import annotations

import contextlib
import socket
import time
from functools import partial
from typing import Final

import pytest
from support.hostile.check_answer import find_fault
from support.hostile.client import Answer, exchange, make_request, parse_answer
from support.hostile.target import Attack, Target

BODY: Final = b'{"prompt": "Hi", "max_tokens": 1}'
POST: Final = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
)
GET: Final = b"GET /version HTTP/1.1\r\nhost: localhost\r\n"
SMUGGLED: Final = b"GET /smuggled HTTP/1.1\r\nhost: localhost\r\n\r\n"
CHUNKED: Final = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH: Final = b"content-length: %d\r\n" % len(BODY)
QUIET_S: Final = 0.5
SLOW_S: Final = 20.0
"""The server allows 5 seconds, and a machine that is busy needs some."""

REFUSED: Final[dict[str, bytes]] = {
    "two codings": POST + b"transfer-encoding: x, chunked\r\n\r\n" + CHUNKED,
    "chunked twice": POST + b"transfer-encoding: chunked, chunked\r\n\r\n" + CHUNKED,
    "chunked not last": POST + b"transfer-encoding: chunked, gzip\r\n\r\n" + CHUNKED,
    "two fields of codings": POST
    + b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n"
    + CHUNKED,
    "an unknown coding": POST + b"transfer-encoding: identity\r\n\r\n" + CHUNKED,
    "an empty coding": POST + b"transfer-encoding:\r\n\r\n" + CHUNKED,
    "a coding and a length": POST + b"transfer-encoding: chunked\r\n" + LENGTH + b"\r\n" + CHUNKED,
    "a length and a coding": POST + LENGTH + b"transfer-encoding: chunked\r\n\r\n" + CHUNKED,
    "a coding after a vertical tab": POST + b"transfer-encoding: \x0bchunked\r\n\r\n" + CHUNKED,
    "a blank before the colon": POST + b"transfer-encoding : chunked\r\n\r\n" + CHUNKED,
    "two lengths": POST + LENGTH + b"content-length: 5\r\n\r\n" + BODY,
    "a list of lengths": POST + b"content-length: 33, 5\r\n\r\n" + BODY,
    "a length with a sign": POST + b"content-length: +33\r\n\r\n" + BODY,
    "a negative length": POST + b"content-length: -1\r\n\r\n" + BODY,
    "a length with a blank": POST + b"content-length: 3 3\r\n\r\n" + BODY,
    "a hexadecimal length": POST + b"content-length: 0x21\r\n\r\n" + BODY,
    "an empty length": POST + b"content-length:\r\n\r\n" + BODY,
    "a length beyond 64 bits": POST + b"content-length: 99999999999999999999999\r\n\r\n" + BODY,
    "a length beyond the limit": POST + b"content-length: 9999999999999\r\n\r\n" + BODY,
    "a chunk of no number": POST + b"transfer-encoding: chunked\r\n\r\nxyz\r\n" + BODY,
    "a negative chunk": POST + b"transfer-encoding: chunked\r\n\r\n-1\r\n" + BODY,
    "a chunk beyond 64 bits": POST
    + b"transfer-encoding: chunked\r\n\r\n"
    + b"F" * 20
    + b"\r\n"
    + BODY,
    "a chunk with a prefix": POST + b"transfer-encoding: chunked\r\n\r\n0x21\r\n" + BODY,
    "a chunk that goes on": POST + b"transfer-encoding: chunked\r\n\r\n5\r\n" + BODY,
    "a field without a name": POST + b": x\r\n" + LENGTH + b"\r\n" + BODY,
    "a field without a colon": POST + b"nothing\r\n" + LENGTH + b"\r\n" + BODY,
    "a null byte in a field": POST + b"x: a\x00b\r\n" + LENGTH + b"\r\n" + BODY,
    "a name with a control byte": POST + b"x\x01y: a\r\n" + LENGTH + b"\r\n" + BODY,
    "a head of 1 MB": POST + b"x: " + b"a" * 1_000_000 + b"\r\n" + LENGTH + b"\r\n" + BODY,
    "100,000 fields": POST + b"x: y\r\n" * 100_000 + LENGTH + b"\r\n" + BODY,
    "a path of 1 MB": b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "an unknown method": b"BREW /version HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a method of 1 MB": b"G" * 1_000_000 + b" / HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "HTTP/3.0": b"GET /version HTTP/3.0\r\nhost: localhost\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x55" * 512,
    "zeros": bytes(4096),
    "a tunnel": b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nhost: 127.0.0.1:22\r\n\r\n",
    "two hosts": b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n",
    "another host": b"GET /v1/models HTTP/1.1\r\nhost: evil.example\r\n\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "a missing route": b"GET /%00/../../etc/passwd HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a path that is not UTF-8": b"GET /v1/models/%ff%fe HTTP/1.1\r\nhost: localhost\r\n\r\n",
}

ANSWERED: Final[dict[str, bytes]] = {
    "HTTP/0.9": b"GET /version\r\n\r\n",
    "an empty line first": b"\r\n\r\n" + GET + b"\r\n",
    "line feeds alone": b"GET /version HTTP/1.1\nhost: localhost\n\n",
    "a folded field": GET + b"x: a\r\n b\r\n\r\n",
    "an upgrade": GET + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\n\r\n",
    "a WebSocket": GET + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n",
    "an absolute address": b"GET http://localhost/version HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "options of all": b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a query of 50 KB": b"GET /version?"
    + b"a=1&" * 12_000
    + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "an expectation": POST + b"expect: the worst\r\n" + LENGTH + b"\r\n" + BODY,
    "many connections": GET + b"connection: close, keep-alive, close\r\n\r\n",
    "a trailer": POST
    + b"transfer-encoding: chunked\r\n\r\n"
    + CHUNKED[:-2]
    + b"content-length: 5\r\n\r\n",
    "chunk extensions": POST
    + b"transfer-encoding: chunked\r\n\r\n%x;a=b;c\r\n%b\r\n0;d\r\n\r\n" % (len(BODY), BODY),
    "ranges": GET + b"range: bytes=0-0," * 1 + b"5-\r\n\r\n",
}
"""Requests that may be accepted or rejected, with exactly one answer."""


def send_and_listen(target: Target, data: bytes) -> tuple[list[Answer], bool]:
    """Send `data` and a request behind it. Returns the answers, and whether the connection was closed."""
    with socket.create_connection(target.address, 10) as connection:
        first = exchange(connection, data, 10)
        answers = [first] if first.status else []
        received, is_closed = bytearray(), first.is_closed
        connection.settimeout(QUIET_S)
        try:
            connection.sendall(SMUGGLED)
            while data := connection.recv(65536):
                received += data
            is_closed = True
        except TimeoutError:
            pass
        except OSError:
            is_closed = True
        if (answer := parse_answer(received)) is not None:
            answers.append(answer)
    return answers, is_closed


@pytest.mark.parametrize("name", REFUSED)
def test_malformed_requests_are_rejected(target: Target, name: str) -> None:
    with target.watching() as intervals:
        answers, _ = send_and_listen(target, REFUSED[name])
    assert answers, "the connection was closed without an answer"
    assert not find_fault(answers[0], may_succeed=False), answers[0]
    # Data after it is answered as a separate request or not at all, never as a part of this one.
    assert [answer.status for answer in answers[1:]] in ([], [404])
    assert not intervals[0].broken


@pytest.mark.parametrize("name", ANSWERED)
def test_unusual_requests_get_exactly_one_answer(target: Target, name: str) -> None:
    answers, _ = send_and_listen(target, ANSWERED[name])
    assert answers and not find_fault(answers[0]), answers
    assert [answer.status for answer in answers[1:]] in ([], [404])


@pytest.mark.parametrize(
    "header",
    [
        "x-request-timeout: nan",
        "x-request-timeout: inf",
        "x-request-timeout: -1",
        "x-request-timeout: 1e999",
        "x-request-timeout: " + "9" * 5000,
        "x-request-timeout: \u0661",
        "x-request-timeout: ",
        "x-data-parallel-rank: -1",
        "x-data-parallel-rank: 1_0",
        "x-data-parallel-rank: " + "9" * 5000,
        "last-event-id: " + "cmpl-1:1" * 2000,
        "last-event-id: cmpl-1:" + "1." * 8000 + "1",
        "last-event-id: cmpl-1:1e999",
        "last-event-id: cmpl-1:\u0661",
        "last-event-id: ::::",
        "last-event-id: \x7f:done",
        "idempotency-key: " + "k" * 20_000,
        "idempotency-key: \u00e9",
        "idempotency-key: ",
        "x-request-id: " + "i" * 20_000,
        "x-request-id: \u00e9\u00ff\x7f",
        "authorization: Bearer " + "k" * 20_000,
        "authorization: \u00ff",
        "accept: " + "text/plain;q=0.1," * 1000,
        "accept-encoding: br;q=1.0, *;q=0",
        "content-encoding: gzip",
        "content-encoding: " + "x," * 1000,
        "content-type: application/json; charset=utf-16",
        "content-type: application/json; " + "a=b; " * 1000,
        "cookie: " + "a=b; " * 2000,
        "forwarded: for=127.0.0.1;proto=https;host=evil.example",
        "x-forwarded-host: evil.example",
        "traceparent: 00-" + "z" * 500,
    ],
)
def test_headers_of_any_content_get_a_clear_answer(target: Target, header: str) -> None:
    headers = [header.encode().decode("latin-1")]
    request = partial(make_request, "POST", "/v1/completions", BODY, headers)
    assert not target.find_faults([Attack(header[:60], request)])


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "text/plain; charset=utf-8", "application/x-www-form-urlencoded", "", "a/b/c"],
)
def test_bodies_of_other_content_types_are_rejected(target: Target, content_type: str) -> None:
    attacks = [
        Attack(
            f"{route.path} {content_type}",
            partial(make_request, "POST", route.path, BODY, [f"content-type: {content_type}"]),
            may_succeed=False,
            path=route.path,
        )
        for route in target.routes
        # Clients of Ollama send none, or another one.
        if route.schema and not route.path.startswith("/api/")
    ]
    faults = target.find_faults(attacks)
    assert not faults, faults


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost.evil.example"])
def test_web_pages_may_not_operate_the_server(target: Target, origin: str) -> None:
    for path in ("/reset_prefix_cache", "/replicas/0/drain", "/debug/dump"):
        with target.client() as client:
            answer = client.send(make_request("POST", path, b"", [f"origin: {origin}"]))
        assert answer.status in (400, 401, 403, 415), (path, answer)
        assert "access-control-allow-origin" not in answer.headers


def test_many_bodies_in_flight_are_bounded(target: Target) -> None:
    """100 bodies of which 8 MB each have come would be 800 MB."""
    memory = target.begin_memory()
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(100):
            connection = stack.enter_context(socket.create_connection(target.address, SLOW_S))
            connection.settimeout(0.2)
            connections.append(connection)
            with contextlib.suppress(OSError):
                connection.sendall(POST + b"content-length: 31000000\r\n\r\n" + b" " * 8_000_000)
        growth = target.find_growth(memory)
        with target.client() as client:
            answer = client.post("/v1/completions", BODY)
        assert answer.status in (200, 429, 503), answer
    assert not growth, growth
    assert not target.find_faults(
        [Attack("after them", partial(make_request, "GET", "/readyz", b""))]
    )


def test_many_idle_connections_do_not_block_others(target: Target) -> None:
    with target.watching() as intervals, contextlib.ExitStack() as stack:
        for number in range(400):
            connection = stack.enter_context(socket.create_connection(target.address, SLOW_S))
            connection.sendall((b"", b"G", POST, b"\r\n")[number % 4])
        with target.client() as client:
            assert client.post("/v1/completions", BODY).status == 200
    assert not intervals[0].broken


def test_a_thousand_requests_in_one_packet_are_answered_in_order(target: Target) -> None:
    with socket.create_connection(target.address, SLOW_S) as connection:
        connection.settimeout(SLOW_S)
        request = GET + b"x-request-id: %d\r\n\r\n"
        connection.sendall(b"".join(request % number for number in range(1000)))
        received = bytearray()
        while received.count(b"HTTP/1.1 200") < 1000 and (data := connection.recv(1 << 16)):
            received += data
    ids = [line for line in received.split(b"\r\n") if line.startswith(b"x-request-id: ")]
    assert ids == [b"x-request-id: %d" % number for number in range(1000)]


def test_requests_of_disconnected_clients_are_aborted(target: Target) -> None:
    body = b'{"prompt": "Hi", "max_tokens": 400, "stream": true}'
    for _ in range(100):
        with socket.create_connection(target.address, SLOW_S) as connection:
            connection.sendall(make_request("POST", "/v1/completions", body))
    deadline = time.monotonic() + SLOW_S
    while target.server.metric("engine:num_requests_running") > 8:
        assert time.monotonic() < deadline, "requests of clients that are gone still run"
        time.sleep(0.05)
