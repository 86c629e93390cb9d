"""The command `engine run-batch`: answer a file of requests, with its own engine or a running server."""

from __future__ import annotations

import argparse
import http.client
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Final
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import msgspec

from ...protocol.errors import EngineError, counted
from ..api.batches.lines import (
    BatchLine,
    error_line,
    find_errors,
    parse_line,
    result_line,
    split_lines,
)
from ..api.logprobs import Json
from ..cli.parsers import add_option, command_parser
from ..cli.remote.own_server import own_server
from ..cli.remote.server import UnixConnection
from ..supervisor.console import Console, reports_errors

CONCURRENCY: Final = 128
MAX_RETRY_S: Final = 30.0
TRANSFER_S: Final = 1000.0
"""Maximum seconds without progress while a file is read from a URL or written to one."""
TIMEOUT_S: Final = 24 * 3600.0
"""Maximum seconds until a server answers."""


class _Server:
    """A server that answers requests. Each thread has its own connection.

    `url` is an HTTP URL, or the path of a Unix socket.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._local = threading.local()

    def answer(self, request: BatchLine) -> Json:
        """Return the output line for a request. While the server has no room for the request, it is sent again."""
        body = msgspec.json.encode(request.body)
        while True:
            try:
                status, headers, content = self.call("POST", request.url, body)
            except (OSError, http.client.HTTPException) as error:
                return error_line(request.custom_id, "connection_error", f"no answer: {error}")
            retry_after = headers.get("retry-after")
            if status not in (429, 503) or retry_after is None:
                break
            time.sleep(min(float(retry_after), MAX_RETRY_S))
        request_id, kind = headers.get("x-request-id", ""), headers.get_content_type()
        return result_line(request.custom_id, status, request_id, content, kind)

    def call(
        self, method: str, path: str, body: bytes | None = None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Send a request and return the status, the headers and the body of the response."""
        connection = getattr(self._local, "connection", None) or self._connect()
        self._local.connection = None
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            content = response.read()
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            self._local.connection = connection
        return response.status, response.headers, content

    def _connect(self) -> http.client.HTTPConnection:
        if "://" not in self._url:
            return UnixConnection(self._url, TIMEOUT_S)
        parts = urlsplit(self._url)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        return kind(parts.netloc, timeout=TIMEOUT_S)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine run-batch`, without the flags of `engine serve`."""
    parser = command_parser(
        "run-batch",
        "Run the requests in a file in OpenAI's batch format. Without --url an engine is started, and "
        "all flags of engine serve are accepted.",
        "[MODEL] -i FILE -o FILE [--url URL] [flags]",
        takes_serve_flags=True,
    )
    about = "File or URL with requests; - is standard input"
    add_option(parser, "-i --input-file", about, "FILE", required=True)
    about = "File or URL (PUT) for answers; - is standard output"
    add_option(parser, "-o --output-file", about, "FILE", required=True)
    add_option(parser, "--url", "URL of a server to use (default: start an engine)")
    add_option(parser, "--api-key", "API key for --url", "KEY")
    add_option(parser, "--concurrency", "Maximum concurrent requests", "N", int, CONCURRENCY)
    return parser


@reports_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Write a line for each request. Return 1 if any request failed; invalid arguments exit with code 2."""
    parser = make_parser()
    own, flags = parser.parse_known_args(argv)
    if own.concurrency < 1:
        parser.error(f"--concurrency must be at least 1, got {own.concurrency}")
    if own.url is not None and flags:
        parser.error(f"{flags[0]} has no effect with --url")
    if _is_same_file(own.input_file, own.output_file):
        parser.error(f"--output-file {own.output_file} is the input file")
    console = Console()
    lines = list(split_lines(_read(own.input_file)))
    if lines:
        _verify(lines)
    with ExitStack() as stack:
        output = stack.enter_context(_open_output(own.output_file))
        if not lines:
            return 0
        if own.url is not None:
            server = _Server(own.url, own.api_key)
        else:
            started = stack.enter_context(own_server(flags))
            server = _Server(started.url.removeprefix("unix:"), started.api_key)
        num_failed = _answer_all(server, lines, output, own.concurrency)
    console.line(
        f"{counted(len(lines), 'request')}: {len(lines) - num_failed} answered, {num_failed} failed"
    )
    return 1 if num_failed else 0


def _is_same_file(first: str, second: str) -> bool:
    return Path(first).exists() and Path(second).exists() and Path(first).samefile(second)


def _is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def _read(name: str) -> bytes:
    if _is_url(name):
        with urlopen(name, timeout=TRANSFER_S) as response:
            content: bytes = response.read()
            return content
    return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()


@contextmanager
def _open_output(name: str) -> Iterator[IO[bytes]]:
    if name == "-":
        yield sys.stdout.buffer
        return
    if _is_url(name):
        with TemporaryFile() as answers:
            yield answers
            size = answers.tell()
            answers.seek(0)
            headers = {"content-length": str(size)}
            urlopen(Request(name, answers, headers, method="PUT"), timeout=TRANSFER_S).close()
        return
    with open(name, "wb") as file:
        yield file


def _verify(lines: list[bytes]) -> None:
    """Raise EngineError if a line is not a valid request."""
    _, errors = find_errors(lines, None)
    if errors:
        shown = "; ".join(f"line {error['line']}: {error['message']}" for error in errors)
        raise EngineError(f"the input file is invalid: {shown}")


def _answer_all(server: _Server, lines: list[bytes], output: IO[bytes], concurrency: int) -> int:
    """Write the answers in the order of the requests. Return the number of failed requests."""
    num_failed = 0
    with ThreadPoolExecutor(concurrency) as threads:
        requests = (parse_line(line, None) for line in lines)
        for answer in threads.map(server.answer, requests):
            response = answer["response"]
            num_failed += response is None or response["status_code"] >= 400
            output.write(msgspec.json.encode(answer) + b"\n")
            output.flush()
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
