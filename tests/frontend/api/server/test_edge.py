"""The ends of requests: unexpected errors, disconnections, and what is freed."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import msgspec
import pytest
from engine.frontend.api.bodies.body import ClientDisconnected
from engine.frontend.api.bodies.disconnection import while_connected
from engine.frontend.api.edge import Edge
from engine.frontend.api.generation import ClientWatch
from engine.frontend.http.access import Access
from engine.frontend.http.errors import echo, redact
from engine.frontend.http.shown_values import MAX_SHOWN
from engine.protocol.config import FrontendConfig
from support.servers.engine_fixtures import on_event_loop


def ask(app: Any, **headers: str) -> tuple[int, dict[str, str], dict[str, Any]]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    access = Access(FrontendConfig(), is_loopback=False)
    asyncio.run(Edge(app, access, "")(scope, receive, send))
    start, body = sent
    answered = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], answered, msgspec.json.decode(body["body"])


def test_an_unexpected_error_is_logged_once_and_hidden_from_the_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("secret of /srv/models/private")

    status, headers, body = ask(broken, **{"x-request-id": "r-17"})
    assert status == 500 and headers["x-request-id"] == "r-17"
    assert body["error"]["type"] == "internal_server_error"
    assert "r-17" in body["error"]["message"] and "secret" not in body["error"]["message"]
    [record] = caplog.records
    assert "r-17" in record.getMessage() and "secret" in str(record.exc_info)


def test_paths_and_addresses_are_removed_from_errors() -> None:
    text = (
        "cannot read /srv/models/a.gguf at 0x7f00deadbeef from ipc:///tmp/run/core0: org/model 3/4"
    )
    cleaned = redact(text)
    assert cleaned == "cannot read [path] at [address] from [address] org/model 3/4"


def test_echoed_values_are_truncated() -> None:
    assert echo({"a": 1}) == '{"a":1}'
    assert len(echo("x" * 10**6)) < MAX_SHOWN + 50
    assert echo(2**200).startswith("16069")


def test_work_that_fails_after_its_client_has_left_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ConnectionError("closed")

    with pytest.raises(ClientDisconnected):
        asyncio.run(while_connected(receive, work()))
    assert not caplog.records


@on_event_loop
async def test_an_ended_request_is_freed_without_a_garbage_collection() -> None:
    """A cycle would keep the prompt and the output of each request for up to a minute under load."""

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    class Group:
        def leave(self) -> None:
            pass

    group: Any = Group()
    kept = weakref.ref(group)
    with ClientWatch(receive, group):
        await asyncio.sleep(0)
    del group
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert kept() is None
