"""Overload: requests beyond a limit are rejected or cut, and others are not affected."""

import contextlib
import json
import select
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import psutil
import pytest
from engine.frontend.http.connection import MAX_HEAD_BYTES
from support.processes.program import wait_until
from support.servers.server import Server, assert_nothing_is_held, default_model

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

SLOW_CLIENT_S = 1
LONG = 2000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(
        *("--model", default_model(), "--device", "null", "--null-step-ms", "2", "-np", "2"),
        *("--max-num-queued-reqs", "3", "--max-num-queued-reqs-per-tenant", "2"),
        *("--timeout-slow-client", str(SLOW_CLIENT_S), "--heartbeat-timeout", "60"),
    ) as server:
        yield server


class Answer:
    """A completion that is requested in its own thread."""

    def __init__(self, server: Server, headers: dict[str, str] | None = None, **fields: object):
        body = {"prompt": [10], "max_tokens": LONG, "ignore_eos": True, **fields}
        self._request = urllib.request.Request(
            server.url + "/v1/completions",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json", **(headers or {})},
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=60) as response:
                body = response.read()
                is_json = response.headers["content-type"] == "application/json"
                self._result = (
                    response.status,
                    response.headers,
                    json.loads(body) if is_json else body,
                )
        except urllib.error.HTTPError as error:
            with error:
                self._result = error.code, error.headers, json.load(error)

    def wait(self):
        """Return status, headers and body."""
        self._thread.join()
        return self._result


def waiting(server: Server, count: int) -> None:
    wait_until(lambda: server.metric("engine:num_requests_waiting") == count, what=f"{count} wait")


@pytest.fixture
def busy(server: Server) -> Iterator[contextlib.ExitStack]:
    """Occupy both slots until the stack is closed, with two requests of tenant a waiting."""
    with contextlib.ExitStack() as running:
        body = {"prompt": [10], "max_tokens": 8000, "ignore_eos": True, "user": "a"}
        for _ in range(2):
            client = running.enter_context(connect(server))
            text = json.dumps(body).encode()
            client.sendall(POST + b"Content-Length: %d\r\n\r\n%b" % (len(text), text))
        wait_until(lambda: server.metric("engine:num_requests_running") == 2, what="two run")
        answers = [Answer(server, user="a", max_tokens=5) for _ in range(2)]
        waiting(server, 2)
        yield running
    assert [answer.wait()[0] for answer in answers] == [200, 200]
    waiting(server, 0)


def test_a_tenant_over_its_limit_is_429_and_a_full_queue_503(
    server: Server, busy: contextlib.ExitStack
) -> None:
    status, headers, body = Answer(server, user="a").wait()
    assert status == 429 and int(headers["retry-after"]) >= 1
    assert body["error"]["type"] == "rate_limit_error"
    assert "max_num_queued_reqs_per_tenant=2" in body["error"]["message"]
    other = Answer(server, user="b", max_tokens=5)
    waiting(server, 3)
    status, headers, body = Answer(server, user="c").wait()
    assert status == 503 and int(headers["retry-after"]) >= 1
    assert "queue is full" in body["error"]["message"]
    busy.close()
    assert other.wait()[0] == 200


def test_a_server_is_not_ready_while_its_queue_is_full(
    server: Server, busy: contextlib.ExitStack
) -> None:
    assert server.get("/readyz")[0] == 200
    last = Answer(server, user="b", max_tokens=5)
    waiting(server, 3)
    status, body = server.get("/readyz")
    assert (status, body["state"]) == (503, "not ready")
    assert "4 sequences would wait, but the limit is 3" in body["detail"]
    assert server.get("/health")[0] == server.get("/livez")[0] == 200
    busy.close()
    assert last.wait()[0] == 200
    assert server.get("/readyz")[0] == 200


@pytest.mark.usefixtures("busy")
def test_a_deadline_that_passes_in_the_queue_is_504(server: Server) -> None:
    status, headers, body = Answer(server, {"X-Request-Timeout": "0.5"}, user="b").wait()
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
    assert int(headers["retry-after"]) >= 1


def test_a_deadline_that_passes_while_running_ends_the_answer_early(
    server: Server,
) -> None:
    status, _, body = Answer(server, {"X-Request-Timeout": "0.6"}).wait()
    (choice,) = body["choices"]
    assert status == 200
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
    assert 0 < body["usage"]["completion_tokens"] < LONG


@contextlib.contextmanager
def standstill(server: Server, *, kills_core: bool) -> Iterator[None]:
    """Stop the worker, so that no core becomes ready. A request must be running."""

    def has_beaten() -> bool:
        processes = server.get("/engine/status")[1]["processes"]
        return any(p["name"] == "core 0" and p["steps_per_s"] > 0 for p in processes)

    # A core that crashes without having made progress also restarts its worker.
    wait_until(has_beaten, what="the supervisor knows of steps")
    worker = server.child("worker 0")
    worker.suspend()
    try:
        if kills_core:
            core = server.child("core 0")
            core.kill()
            core.wait(60)
        yield
    finally:
        worker.resume()


@pytest.mark.parametrize("kills_core", [False, True], ids=["a long step", "no core"])
def test_deadlines_apply_while_the_core_is_blocked(server: Server, kills_core: bool) -> None:
    begun = Answer(server, {"X-Request-Timeout": "3"})
    wait_until(lambda: server.metric("engine:num_requests_running") == 1, what="it runs")
    with standstill(server, kills_core=kills_core):
        late = [
            Answer(server, {"X-Request-Timeout": "0.5"}, stream=stream) for stream in (False, True)
        ]
        for answer in late:
            status, headers, body = answer.wait()
            assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
            assert int(headers["retry-after"]) >= 1
        status, _, body = begun.wait()
        (choice,) = body["choices"]
        assert status == 200
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
        assert 0 < body["usage"]["completion_tokens"] < LONG
    assert Answer(server, max_tokens=5).wait()[0] == 200
    assert_nothing_is_held(server)


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("stream", [False, True])
def test_queue_limits_apply_while_a_core_is_down(server: Server, stream: bool) -> None:
    with standstill(server, kills_core=True):
        more = Answer(server, user="a", max_tokens=5, stream=stream)
        wait_until(lambda: server.get("/load")[1]["server_load"] == 5, what="it waits for a core")
    status, headers, body = more.wait()
    assert status == 429 and int(headers["retry-after"]) >= 1
    assert "max_num_queued_reqs_per_tenant=2" in body["error"]["message"]


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf"])
def test_an_invalid_deadline_is_named_with_its_value(server: Server, value: str) -> None:
    status, _, body = Answer(server, {"X-Request-Timeout": value}).wait()
    assert (status, body["error"]["param"]) == (400, "X-Request-Timeout")
    assert value in body["error"]["message"]


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=20)
    client.settimeout(20)
    return client


def read_all(client: socket.socket) -> bytes:
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/completions HTTP/1.1\r\nX-Slow: ",
        POST + b"Content-Length: 100\r\n\r\n{",
    ],
    ids=["head", "body"],
)
def test_a_client_that_sends_too_slowly_gets_408_and_is_disconnected(
    server: Server, sent: bytes
) -> None:
    with connect(server) as client:
        client.sendall(sent)
        for _ in range(3):
            time.sleep(0.2)
            client.sendall(b"x")
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_a_body_that_stops_arriving_is_cut_even_after_a_fast_start(server: Server) -> None:
    stories = [
        b"Content-Length: 31000000\r\n\r\n" + b" " * 30_000_000,
        b"Content-Length: 100000\r\n\r\n",
        b"",
        b"Transfer-Encoding: chunked\r\n\r\nfffff\r\n",
    ]
    with contextlib.ExitStack() as stack:
        clients = []
        for story in stories:
            clients.append(stack.enter_context(connect(server)))
            clients[-1].sendall(POST + story)
        answers = [read_all(client) for client in clients]
    assert [answer[:13] for answer in answers] == [b"HTTP/1.1 408 "] * len(stories)


def test_a_connection_without_a_request_is_closed(server: Server) -> None:
    with connect(server) as client:
        assert read_all(client) == b""


def test_a_slow_but_steady_upload_is_accepted(server: Server) -> None:
    body = json.dumps({"prompt": [10], "max_tokens": 2}).encode().ljust(12_000)
    with connect(server) as client:
        client.sendall(POST + b"Connection: close\r\n")
        client.sendall(b"Content-Length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 1000):
            client.sendall(body[start : start + 1000])
            time.sleep(0.15)
        assert read_all(client).startswith(b"HTTP/1.1 200 ")


def test_an_endless_head_is_rejected(server: Server) -> None:
    with connect(server) as client:
        client.sendall(b"GET / HTTP/1.1\r\nX-Long: ")
        time.sleep(0.2)
        client.sendall(b"x" * 65 * 1024)
        assert read_all(client).startswith(b"HTTP/1.1 431 ")


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def send_until_refused(client: socket.socket, piece: bytes) -> bytes:
    """Send `piece` repeatedly until the server closes the connection, and return what it has sent."""
    answer = b""
    # The server resets a connection that it closes with unread data.
    with contextlib.suppress(ConnectionError):
        for _ in range(500):
            client.sendall(piece)
            if select.select([client], [], [], 0.005)[0]:
                if not (part := client.recv(65536)):
                    return answer
                answer += part
        pytest.fail(f"{500 * len(piece)} bytes were taken")
    with contextlib.suppress(ConnectionError):
        answer += read_all(client)
    return answer


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"1\r\n{\r\n0\r\n", b"X-Trailer: " + b"z" * 4096 + b"\r\n"),
        (b"1\r\n{\r\n0\r\nX-Trailer: ", b"z" * 4096),
        (b"1\r\n{\r\n1;", b"z" * 4096),
    ],
    ids=["trailers", "trailer", "chunk-extension"],
)
def test_endless_chunk_extensions_and_trailers_are_rejected(
    server: Server, begin: bytes, piece: bytes
) -> None:
    with connect(server) as client:
        client.sendall(CHUNKED + begin)
        answer = send_until_refused(client, piece)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert "65536 bytes" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_chunk_extensions_of_a_long_body_are_accepted(server: Server) -> None:
    body = json.dumps({"prompt": [10], "max_tokens": 2}).encode()
    chunks = b"".join(b"1;note=%b\r\n%c\r\n" % (b"z" * 4096, byte) for byte in body)
    assert len(chunks) > 2 * MAX_HEAD_BYTES
    with connect(server) as client:
        client.sendall(CHUNKED + chunks + b"0\r\nX-Checksum: 1\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_rejection_is_not_mixed_into_the_answer_to_another_request(server: Server) -> None:
    fields = {"prompt": [10], "max_tokens": 2000, "stream": True, "ignore_eos": True}
    body = json.dumps(fields).encode()
    with connect(server) as client:
        head = POST + b"Content-Length: %d\r\n\r\n"
        client.sendall(head % len(body) + body)
        answer = client.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200 ")
        client.sendall(CHUNKED + b"1\r\n{\r\n0\r\nX-Trailer: ")
        answer += send_until_refused(client, b"z" * 4096)
    assert b"HTTP/1.1 4" not in answer


def ask_version(client: socket.socket) -> None:
    """Request the version, and read the whole answer."""
    client.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):
        answer += client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_a_second_request_on_a_connection_is_rejected_with_an_answer(server: Server) -> None:
    with connect(server) as client:
        ask_version(client)
        client.sendall(b"GET / HTTP/1.1\r\nX-Long: ")
        assert send_until_refused(client, b"x" * 4096).startswith(b"HTTP/1.1 431 ")


def test_empty_lines_do_not_keep_a_connection_open(server: Server) -> None:
    with connect(server) as client:
        ask_version(client)
        client.sendall(b"\r\n")
        assert read_all(client) == b""


def test_a_client_that_does_not_read_is_disconnected_and_its_request_aborted(
    server: Server,
) -> None:
    fields = {"prompt": [10], "max_tokens": 8000, "n": 2, "stream": True, "ignore_eos": True}
    body = json.dumps(fields).encode()
    head = POST + b"Content-Length: %d\r\n\r\n" % len(body)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.url.removeprefix("http://").split(":")
        client.connect((host, int(port)))
        client.sendall(head + body)
        wait_until(lambda: server.metric("engine:num_requests_running") == 2, what="it runs")
        # The whole request would take 16 s.
        wait_until(lambda: server.metric("engine:num_requests_running") == 0, what="it is cut")
        with pytest.raises(ConnectionError):
            while client.recv(65536):
                pass


def test_a_frontend_is_restarted_while_the_queue_is_full() -> None:
    args = ("--device", "null", "-np", "1", "--max-num-queued-reqs", "1")
    with (
        Server("--model", default_model(), *args, "--api-server-count", "2") as server,
        contextlib.ExitStack() as stack,
    ):
        frontends = [server.child(f"frontend {index}") for index in (0, 1)]
        of_each: list[list[socket.socket]] = [[], []]

        def accept() -> bool:
            client = stack.enter_context(connect(server))
            port = client.getsockname()[1]

            def ports(frontend: psutil.Process) -> list[int]:
                return [c.raddr.port for c in frontend.net_connections("tcp") if c.raddr]

            wait_until(lambda: any(port in ports(f) for f in frontends), what="it is accepted")
            of_each[port in ports(frontends[1])].append(client)
            return max(map(len, of_each)) == 2

        wait_until(accept, what="a frontend has two connections")
        most = max((0, 1), key=lambda index: len(of_each[index]))
        body = json.dumps({"prompt": [10], "max_tokens": 8000, "ignore_eos": True}).encode()
        head = POST + b"Content-Length: %d\r\n\r\n" % len(body)
        for client in of_each[most]:
            client.sendall(head + body)
        waiting(server, 1)
        frontends[1 - most].kill()

        def restarts() -> int:
            processes = server.get("/engine/status")[1]["processes"]
            return sum(process["num_restarts"] for process in processes)

        wait_until(lambda: restarts() == 1, what="another one takes its place")
        server.wait_until_whole()
        assert restarts() == 1
        waiting(server, 1)


@pytest.mark.parametrize(
    ("framing", "status"),
    [
        (b"Transfer-Encoding: x, chunked\r\n", 501),
        (b"Transfer-Encoding: chunked, chunked\r\n", 400),
        (b"Transfer-Encoding: x\r\nTransfer-Encoding: chunked\r\n", 501),
        (b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", 400),
        (b"Transfer-Encoding: chunked\r\nHost: other\r\n", 400),
    ],
)
def test_a_request_with_an_ambiguous_length_is_rejected(
    server: Server, framing: bytes, status: int
) -> None:
    with connect(server) as client:
        client.sendall(POST + framing + b"\r\n2\r\n{}\r\n0\r\n\r\n")
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_head_over_the_limit_is_rejected_however_it_arrives(server: Server) -> None:
    fields = b"".join(b"X-%d: %b\r\n" % (i, b"y" * 1000) for i in range(80))
    for head in (fields, b"X-Long: " + b"y" * 80_000 + b"\r\n"):
        with connect(server) as client:
            client.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n")
            assert read_all(client).startswith(b"HTTP/1.1 431 ")
    # Data after a complete request in the same read is not part of its head.
    body = json.dumps({"prompt": [10], "max_tokens": 2}).encode().ljust(100_000)
    with connect(server) as client:
        request = b"Content-Length: %d\r\n\r\n" % len(body) + body
        client.sendall(POST + request + POST + b"Connection: close\r\n" + request)
        answer = read_all(client)
    assert answer.count(b"HTTP/1.1 200 ") == 2
