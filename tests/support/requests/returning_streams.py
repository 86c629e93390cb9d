"""Clients that return with Last-Event-ID whenever their stream is cut, until it is complete."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from support.processes.program import wait_until

PATH = "/v1/completions"
TIMEOUT_S = 120.0
PAUSE_S = 0.05
"""Seconds between attempts to connect."""


@dataclass
class ReturningStream:
    """A stream; `find_url` returns the server's address, which may change when it is restarted."""

    find_url: Callable[[], str]
    body: dict[str, Any]
    key: str
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    ends: dict[int, tuple[str, Any]] = field(default_factory=dict)
    usage: Any = None
    ids: set[str] = field(default_factory=set)
    num_events: int = 0
    num_returns: int = 0
    is_done: bool = False
    problem: str = ""
    _last_id: str = ""

    def read(self) -> None:
        """Read to the end."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.is_done and not self.problem:
            if time.monotonic() > deadline:
                self.problem = "it does not end"
                return
            # The server may be down, or its address may not be known yet.
            with contextlib.suppress(OSError, http.client.HTTPException, TypeError):
                self._read_once()
            if not self.is_done:
                self.num_returns += 1
                time.sleep(PAUSE_S)

    def _read_once(self) -> None:
        parts = urlsplit(self.find_url())
        # A client that leaves ends its request, so it must not leave because a loaded machine is slow.
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        # Before the first event there is no ID, so the key prevents the request from being computed twice.
        headers = {"content-type": "application/json", "idempotency-key": self.key}
        if self._last_id:
            headers["last-event-id"] = self._last_id
        try:
            connection.request("POST", PATH, json.dumps(self.body), headers)
            response = connection.getresponse()
            if response.status == 200:
                self._read_events(response)
            elif response.status not in (409, 503):
                self.problem = f"{response.status} {response.read().decode()}"
        finally:
            connection.close()

    def _read_events(self, response: http.client.HTTPResponse) -> None:
        event_id, data = "", b""
        for line in response:
            if line.startswith(b"id: "):
                event_id = line[4:].decode().strip()
            elif line.startswith(b"data: "):
                data = line[6:].strip()
            elif line == b"\n" and data:
                # An event counts when it is complete.
                self._take(data)
                self._last_id = event_id or self._last_id
                event_id, data = "", b""

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.is_done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.problem = json.dumps(event["error"])
            return
        self.num_events += 1
        self.ids.add(event["id"])
        for choice in event["choices"]:
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            if choice["logprobs"] is not None:
                self.logprobs.setdefault(index, []).extend(
                    zip(
                        choice["logprobs"]["tokens"],
                        choice["logprobs"]["top_logprobs"],
                        strict=True,
                    )
                )
            if choice["finish_reason"] is not None:
                if index in self.ends:
                    self.problem = "two ends"
                self.ends[index] = choice["finish_reason"], choice["stop_reason"]
        if event.get("usage"):
            self.usage = event["usage"]["completion_tokens"]

    @property
    def answer(self) -> tuple[Any, ...]:
        """The text that the client has read from the stream."""
        return self.problem, self.is_done, self.texts, self.ends, self.usage, self.logprobs


class ReturningStreams:
    """Streams that all start at once."""

    def __init__(
        self, find_url: Callable[[], str], bodies: list[dict[str, Any]], name: str
    ) -> None:
        self.streams = [
            ReturningStream(find_url, body, f"{name} {number}")
            for number, body in enumerate(bodies)
        ]
        self._threads = [threading.Thread(target=stream.read) for stream in self.streams]
        for thread in self._threads:
            thread.start()

    def wait_for_events(self, count: int) -> None:
        """Wait until `count` more events have arrived."""
        goal = self.num_events + count
        wait_until(lambda: self.num_events >= goal, what=f"{count} events of the streams")

    @property
    def num_events(self) -> int:
        return sum(stream.num_events for stream in self.streams)

    def join(self) -> list[ReturningStream]:
        """Wait for the end of all streams, and return them."""
        for thread in self._threads:
            thread.join()
        return self.streams
