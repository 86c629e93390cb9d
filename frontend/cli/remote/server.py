"""A client of a server with OpenAI's API: its URL, its API key and requests to it."""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import closing
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from ....protocol.errors import EngineError
from ..arguments import read_variables

Json: TypeAlias = dict[str, Any]

DEFAULT_URL: Final = "http://127.0.0.1:8000"
TIMEOUT_S: Final = 600.0
"""Maximum seconds of silence from the server."""
_UNIX: Final = "unix:"
_QUOTED: Final = 300
"""Maximum number of characters of an answer that an error message quotes."""


class ServerError(EngineError):
    """Raised if a server cannot be reached or answers with an error.

    Attributes:
        status: The HTTP status of the answer, or None if there was none.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class UnixConnection(http.client.HTTPConnection):
    """A connection to a server at a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class RemoteServer:
    """A server with OpenAI's API.

    Args:
        url: The URL of the server, with or without `/v1` at the end, or `unix:` and the path of a socket.
        api_key: The API key that is sent with each request, or None.

    Raises:
        ServerError: The URL does not begin with http://, https:// or unix:.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        parts = urlsplit(self.url)
        if not (
            self.url.startswith(_UNIX) or (parts.scheme in ("http", "https") and parts.hostname)
        ):
            raise ServerError(f"--url {url}: must be like {DEFAULT_URL} or https://HOST/v1")
        self.api_key = api_key
        # Loopback addresses of this machine cannot be reached through a proxy.
        proxies: dict[str, str] | None = {} if _is_local(parts.hostname) else None
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))

    def open(
        self, path: str, body: Json | None = None, timeout_s: float = TIMEOUT_S
    ) -> http.client.HTTPResponse:
        """Send a request, with POST if there is a body, and return the response before its body is read.

        Raises:
            ServerError: The server cannot be reached, or answers with an error.
        """
        headers = {"content-type": "application/json"}
        if self.api_key is not None:
            headers["authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            if self.url.startswith(_UNIX):
                return self._open_unix(path, data, headers, timeout_s)
            request = urllib.request.Request(self.url + path, data, headers)
            response: http.client.HTTPResponse = self._opener.open(request, timeout=timeout_s)
            return response
        except urllib.error.HTTPError as error:
            with closing(error):
                raise self._refusal(error.code, error.read()) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise ServerError(
                f"cannot reach {self.url}: {reason}; start a server with engine serve, or pass --url"
            ) from None

    def read_text(self, path: str, timeout_s: float = TIMEOUT_S) -> str:
        """Send a GET request and return the body of the response.

        Raises:
            ServerError: The server cannot be reached, or answers with an error.
        """
        return self._read(self.open(path, timeout_s=timeout_s)).decode(errors="replace")

    def call(self, path: str, body: Json | None = None, timeout_s: float = TIMEOUT_S) -> Json:
        """Send a request and return the JSON object of the response.

        Raises:
            ServerError: The server cannot be reached, or answers with an error or with something else than a JSON
                object.
        """
        content = self._read(self.open(path, body, timeout_s))
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ServerError(f"{self.url}{path} did not answer with a JSON object; check --url")
        return answer

    def stream(self, path: str, body: Json) -> Generator[Json, None, None]:
        """Yield the events of a streamed answer. Closing the iterator ends the request.

        Raises:
            ServerError: The server cannot be reached, answers with an error, or the connection is lost.
        """
        with closing(self.open(path, {**body, "stream": True})) as response:
            try:
                for line in iter(response.readline, b""):
                    field, _, value = line.strip().partition(b":")
                    if field != b"data" or value.strip() == b"[DONE]":
                        continue
                    event = json.loads(value)
                    if error := event.get("error"):
                        raise ServerError(_message_of(error) or f"the answer failed: {error}")
                    yield event
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ServerError(f"the connection to {self.url} was lost: {error}") from None

    def first_model(self) -> str:
        """Return the name of the first model that the server lists.

        Raises:
            ServerError: The server cannot be reached, or lists no models.
        """
        for entry in self.call("/v1/models").get("data") or ():
            return str(entry["id"])
        raise ServerError(f"{self.url} lists no models; pass --model NAME")

    def _open_unix(
        self, path: str, data: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> http.client.HTTPResponse:
        connection = UnixConnection(self.url.removeprefix(_UNIX), timeout_s)
        # From then on the response owns the socket, and closes it.
        headers = {**headers, "connection": "close"}
        connection.request("GET" if data is None else "POST", path, data, headers)
        response = connection.getresponse()
        if response.status >= 400:
            with closing(connection):
                raise self._refusal(response.status, response.read())
        return response

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        with closing(response):
            try:
                return response.read()
            except (OSError, http.client.HTTPException) as error:
                raise ServerError(f"the connection to {self.url} was lost: {error}") from None

    def _refusal(self, status: int, content: bytes) -> ServerError:
        try:
            message = _message_of(json.loads(content).get("error"))
        except (ValueError, AttributeError):
            message = None
        message = message or content.decode(errors="replace")[:_QUOTED].strip() or "no reason given"
        remedy = "; pass a valid API key with --api-key" if status == 401 else ""
        return ServerError(f"{self.url} answers {status}: {message}{remedy}", status)


def find_api_key(given: str | None) -> str | None:
    """Return the API key of a client: `given`, else the value of `OPENAI_API_KEY` or `ENGINE_API_KEY`, else None.

    Raises:
        ConfigError: `ENGINE_API_KEY` is invalid.
    """
    if given or (given := os.environ.get("OPENAI_API_KEY")):
        return given
    return next(iter(read_variables("frontend.api_keys", os.environ) or ()), None)


def find_operator_key(given: str | None) -> str | None:
    """Return an operator's API key: `given`, else that of `ENGINE_ADMIN_API_KEY` or `ENGINE_API_KEY`, else None.

    Raises:
        ConfigError: One of the variables is invalid.
    """
    if given or (given := read_variables("frontend.admin_api_key", os.environ)):
        return given
    return next(iter(read_variables("frontend.api_keys", os.environ) or ()), None)


def _is_local(host: str | None) -> bool:
    if host is None or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _message_of(error: object) -> str | None:
    """Return the message of an error response, in OpenAI's format or as plain text."""
    if isinstance(error, dict):
        error = error.get("message")
    return error if isinstance(error, str) and error else None
