"""Clients that read one response on one connection, and do not return if it is cut."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from support.processes.program import wait_until

TIMEOUT_S = 120.0


class PlainClient(threading.Thread):
    """A client that sends one request and reads its response to the end.

    With `delay_s` it reads a piece only every so many seconds.
    """

    def __init__(self, url: str, path: str, body: dict[str, Any], delay_s: float = 0.0) -> None:
        super().__init__()
        self.path = path
        self.data = b""
        self.problem = ""
        self._body = body
        self._url = urlsplit(url)
        self._delay_s = delay_s
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection(
            self._url.hostname or "", self._url.port, timeout=TIMEOUT_S
        )
        try:
            headers = {"content-type": "application/json", "connection": "close"}
            connection.request("POST", self.path, json.dumps(self._body), headers)
            response = connection.getresponse()
            while piece := response.read1(4096):
                self.data += piece
                time.sleep(self._delay_s)
            if response.status != 200:
                self.problem = f"{response.status} {self.data.decode()}"
        except (OSError, http.client.HTTPException) as error:
            self.problem = repr(error)
        finally:
            connection.close()

    @property
    def answer(self) -> tuple[str, list[Any]]:
        """The problem, if there was one, and what the response says besides IDs and times."""
        parts: list[Any] = []
        for line in self.data.decode().splitlines():
            text = line.removeprefix("data: ")
            if text == "[DONE]":
                parts.append(text)
            elif text.startswith("{"):
                parts.append(_essence(json.loads(text)))
        texts = [part for part in parts if isinstance(part, str)]
        others = [part for part in parts if not isinstance(part, str) and part]
        return self.problem, ["".join(texts), *others]


def _essence(value: Any) -> Any:
    """Return the text of a chunk that has little else, and otherwise what does not differ from one run to the next."""
    match value:
        case {"choices": [{"delta": {"content": str(text)}, "finish_reason": None}]}:
            return text
        case {"delta": {"text": str(text)}, "type": "content_block_delta"}:
            return text
        case {"type": "response.output_text.delta", "delta": str(text), "sequence_number": number}:
            return f"{number}:{text}"
        case {"message": {"content": str(text)}, "done": False}:
            return text
        case {"content": str(text), "stop": False}:
            return text
        case {"choices": [{"text": str(text), "index": int(index), "finish_reason": None}]}:
            return text if index == 0 else None
    return _without(value)


_VOLATILE = {"id", "item_id", "created", "created_at", "completed_at", "timings", "id_slot"}


def _without(value: Any) -> Any:
    if isinstance(value, list):
        return [_without(each) for each in value]
    if isinstance(value, dict):
        return {
            name: _without(each)
            for name, each in value.items()
            if name not in _VOLATILE and not name.endswith("_duration")
        }
    return value


def wait_for_data(clients: list[PlainClient], num_bytes: int) -> None:
    """Wait until all clients with streams have received so many bytes."""
    wait_until(
        lambda: all(len(client.data) >= num_bytes or client.problem for client in clients),
        what=f"{num_bytes} bytes of all streams",
    )
