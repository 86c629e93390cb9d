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
        self._connection = http.client.HTTPConnection(
            self._url.hostname or "", self._url.port, timeout=TIMEOUT_S
        )
        self.start()

    def send_another(self) -> None:
        """Send another request before the response has ended. Its response is not read."""
        self._connection.sock.sendall(
            b"GET /health HTTP/1.1\r\nhost: %b\r\n\r\n" % self._url.netloc.encode()
        )

    def run(self) -> None:
        connection = self._connection
        try:
            # As behind a proxy that ends TLS.
            headers = {"x-forwarded-proto": "https", "content-type": "application/json"}
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
    def answer(self) -> tuple[str, dict[int, str], list[Any]]:
        """The problem if there was one, the texts of streams, and all else in the response but IDs and times."""
        texts: dict[int, str] = {}
        others: list[Any] = []
        for line in self.data.decode().splitlines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                others.append(data)
            if not data.startswith("{"):
                continue
            event = json.loads(data)
            index, text, is_only_text = _take_text(event)
            texts[index] = texts.get(index, "") + text
            if not is_only_text:
                others.append(_without(event))
        return self.problem, texts, others


def _take_text(event: Any) -> tuple[int, str, bool]:
    """Remove the new text from an event. Return its index, the text, and whether the event has nothing else.

    The text before the end may come together with it.
    """
    match event:
        case {"choices": [{"delta": delta} as choice]}:
            return 0, delta.pop("content", None) or "", choice["finish_reason"] is None
        case {"choices": [{"text": str(text), "index": int(index)} as choice]}:
            choice["text"] = ""
            return index, text, choice["finish_reason"] is None
        case {"type": "response.output_text.delta", "delta": str(text), "sequence_number": number}:
            return 0, f"{number}:{text}", True
        case {"message": {"content": str(text)} as message, "done": done}:
            message["content"] = ""
            return 0, text, not done
        case {"content": str(text), "stop": stop}:
            event["content"] = ""
            return 0, text, not stop
    return 0, "", False


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
