"""Streams: clients that disconnect, clients that do not read, engines that fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import httpx
import pytest
from engine.frontend.api.generation import raise_if_failed
from engine.frontend.api.streaming.event_stream import (
    OPENAI_STREAM,
    ChunkEncoder,
    EventStream,
    Template,
)
from engine.frontend.client.engine_client import Sequence, SequenceRequest
from engine.protocol.errors import NO_ADAPTER_MEMORY
from engine.protocol.messages import (
    AbortRequests,
    AddRequests,
    EngineCoreOutputs,
    FinishedRequest,
    FinishReason,
)
from engine.protocol.sampling_params import SamplingParams
from support.servers.engine_fixtures import (
    connected,
    engine_config,
    on_event_loop,
    smollm2_tokenizer,
)
from support.servers.engine_fixtures import until as advance_until
from support.servers.frontend_process import MODEL, FrontendProcess, sse_events

pytestmark = pytest.mark.slow

PROMPT = "One two three four five"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def until(condition: Any, what: str, timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def num_received(frontend: FrontendProcess, kind: type) -> int:
    return sum(isinstance(message, kind) for message in frontend.core.received)


def num_aborts(frontend: FrontendProcess) -> int:
    return num_received(frontend, AbortRequests)


def encode_request(path: str, body: dict) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def raw_request(port: int, path: str, body: dict, receive_buffer: int = 0) -> socket.socket:
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", port))
    connection.sendall(encode_request(path, body))
    return connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_requests_of_a_disconnected_client_are_aborted(path: str, stream: bool) -> None:
    with FrontendProcess(step_s=0.05) as frontend:
        prompt = (
            {"prompt": PROMPT}
            if path == COMPLETIONS
            else {"messages": [{"role": "user", "content": PROMPT}]}
        )
        body = {"model": MODEL, "max_tokens": 400, "n": 2, "stream": stream, **prompt}
        connection = raw_request(frontend.port, path, body)
        until(lambda: len(frontend.core.requests) == 2, "the request did not start")
        if stream:
            assert connection.recv(100)
        before = {e.request.request_index: e.num_generated for e in running(frontend)}
        connection.close()
        until(lambda: num_aborts(frontend) == 1, "nothing was aborted")
        until(lambda: not frontend.core.requests, "the core still generates")
        assert before and max(before.values()) < 100
        assert frontend.http.get("/load").json() == {"server_load": 0}
        assert frontend.complete(PROMPT, max_tokens=2)["choices"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnected_client_with_a_pipelined_request_is_aborted(stream: bool) -> None:
    with FrontendProcess(step_s=0.05) as frontend:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 400, "stream": stream}
        connection = raw_request(frontend.port, COMPLETIONS, body)
        until(lambda: frontend.core.requests, "the request did not start")
        connection.sendall(encode_request(COMPLETIONS, body | {"prompt": "Six"}))
        before = running(frontend)[0].num_generated
        until(lambda: running(frontend)[0].num_generated > before + 2, "it does not go on")
        connection.close()
        until(lambda: not frontend.core.requests, "the core still generates")
        assert num_aborts(frontend) == 1
        assert frontend.http.get("/load").json() == {"server_load": 0}


def running(frontend: FrontendProcess) -> list[Any]:
    return [echo for of in frontend.core.running.values() for echo in of.values()]


def test_a_slow_reader_delays_only_itself() -> None:
    num_tokens = 4000
    with FrontendProcess(max_model_len=8192, step_s=0.0, send_buffer=8192) as frontend:
        body = {
            "model": MODEL,
            "prompt": PROMPT,
            "max_tokens": num_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        num_before = num_received(frontend, AddRequests)
        slow = raw_request(frontend.port, COMPLETIONS, body, receive_buffer=4096)
        # The core may generate everything before this thread runs again.
        until(lambda: num_received(frontend, AddRequests) > num_before, "the request did not start")
        others = [frontend.complete(PROMPT, max_tokens=50) for _ in range(5)]
        assert all(other["usage"]["completion_tokens"] == 50 for other in others)
        until(lambda: not frontend.core.requests, "generation waits for the reader", 30)
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            piece = slow.recv(65536)
            assert piece
            received += piece
        slow.close()
        lines = [line for line in received.split(b"\n") if line.startswith(b"data: {")]
        events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
        text = "".join(e["choices"][0]["text"] for e in events if e["choices"])
        assert text == PROMPT * (num_tokens // 5)
        assert events[-1]["usage"]["completion_tokens"] == num_tokens
        assert len(events) < num_tokens / 2, "what was not read became one chunk"


@pytest.mark.parametrize("method", [EventStream.encode, EventStream.write])
@on_event_loop
async def test_a_stream_loses_nothing_if_a_callback_fails(
    tmp_path: Path, method: FunctionType
) -> None:
    async def send(message: Any) -> None: ...

    async def receive() -> Any:
        await asyncio.Event().wait()

    def fail_once(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is method.__code__:
            sys.setprofile(None)
            raise MemoryError

    prompt = smollm2_tokenizer().encode(PROMPT)
    async with connected(engine_config(tmp_path)) as (client, core):
        failures: list[Exception] = []

        def recover(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            failures.append(context["exception"])
            client.resume_outputs()

        asyncio.get_running_loop().set_exception_handler(recover)
        request = SequenceRequest(prompt, SamplingParams(max_tokens=len(prompt)))
        group = await client.submit([request], request_id="r")
        connection = _Chunks()
        stream = EventStream(send, connection)
        running = asyncio.create_task(stream.run(receive, group, _Filled()))
        await advance_until(lambda: bool(core.requests), core.receive)
        await advance_until(lambda: bool(connection.written), core.step)
        sys.setprofile(fail_once)
        await advance_until(lambda: not group.num_unfinished, core.step)
        await running
        assert b"".join(connection.written).decode() == PROMPT
        assert len(failures) == 1


def test_a_stream_over_http_1_0_ends_with_its_connection(frontend: FrontendProcess) -> None:
    for path, prompt in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
    ):
        for fields in ({"stream": True}, {}):
            body = json.dumps({"max_tokens": 5, **prompt, **fields}).encode()
            head = f"POST {path} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            # HTTP/1.0 has no chunks, even on kept-alive connections.
            head += "connection: keep-alive\r\n\r\n"
            with socket.create_connection(("127.0.0.1", frontend.port), timeout=20) as client:
                client.sendall(head.encode() + body)
                answer = b"".join(iter(lambda: client.recv(65536), b""))
            answer_head, _, answer_body = answer.partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in answer_head
            assert b"connection: close" in answer_head
            if fields:
                events = sse_events(answer_body.decode())
                assert events[-1]["choices"][0]["finish_reason"] == "length"
            else:
                assert json.loads(answer_body)["choices"]


def test_chunks_have_as_many_tokens_as_the_request_asks_for(frontend: FrontendProcess) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    for path, fields in (
        (COMPLETIONS, body | {"stream_interval": 12}),
        (
            "/generate",
            {"text": PROMPT, "sampling_params": {"max_new_tokens": 40, "stream_interval": 12}},
        ),
    ):
        events = sse_events(frontend.post(path, stream=True, **fields).text)
        if path == COMPLETIONS:
            counts = [len(event["choices"][0]["token_ids"]) for event in events]
        else:
            # Each event repeats the earlier tokens.
            ends = [0, *(len(event["output_ids"]) for event in events)]
            counts = [end - start for start, end in pairwise(ends)]
        assert sum(counts) == 40
        assert all(count >= 12 for count in counts[1:-1] if count), counts
        assert len(counts) < 8


def test_many_streams_run_at_once(frontend: FrontendProcess) -> None:
    prompts = [f"{i} apples and {i + 1} pears" for i in range(64)]
    texts: dict[int, str] = {}

    async def read_all() -> None:
        url = f"http://127.0.0.1:{frontend.port}{COMPLETIONS}"
        async with httpx.AsyncClient(timeout=20, limits=httpx.Limits()) as http:

            async def read(i: int) -> None:
                body = {"prompt": prompts[i], "max_tokens": 60, "stream": True}
                events = sse_events((await http.post(url, json=body)).text)
                texts[i] = "".join(event["choices"][0]["text"] for event in events)

            await asyncio.gather(*map(read, range(64)))

    asyncio.run(read_all())
    for i, prompt in enumerate(prompts):
        assert texts[i] == (prompt * 60)[: len(texts[i])] and len(texts[i]) > 100


def test_an_engine_error_during_a_stream_is_an_event_followed_by_done(
    frontend: FrontendProcess,
) -> None:
    with FrontendProcess(step_s=0.02) as frontend:
        core = frontend.core
        original = core.step

        def fail_when_running() -> None:
            if not any(echoed.num_generated > 3 for echoed in running(frontend)):
                original()
                return
            [client] = core.running
            [index] = core.running[client]
            reason = FinishedRequest(
                index,
                FinishReason.ERROR,
                message="bad luck in /srv/models/x/y.py at 0x7f3412345678",
            )
            core.running[client].clear()
            core.send(client, EngineCoreOutputs(0, 0, time.monotonic(), finished=[reason]))

        core.step = fail_when_running
        response = frontend.post(COMPLETIONS, prompt=PROMPT, max_tokens=400, stream=True)
        assert response.status_code == 200
        *chunks, last = sse_events(response.text)
        assert chunks and last["error"]["type"] == "internal_server_error"
        assert "bad luck" in last["error"]["message"]
        assert "/srv" not in last["error"]["message"] and "0x7f" not in last["error"]["message"]

        chat = {"messages": [{"role": "user", "content": PROMPT}], "stream": True}
        response = frontend.post("/v1/messages", max_tokens=400, **chat)
        event = response.text.strip().split("\n\n")[-1]
        name, data = event.split("\n")
        error = json.loads(data.removeprefix("data: "))
        assert name == "event: error" and error["error"]["type"] == "api_error"
        response = frontend.post("/api/chat", **chat)
        assert "bad luck" in json.loads(response.text.splitlines()[-1])["error"]


@pytest.mark.parametrize(
    ("reason", "message", "status"),
    [
        (FinishReason.ERROR, "no luck", 500),
        (FinishReason.IGNORED, "no luck", 400),
        (FinishReason.IGNORED, NO_ADAPTER_MEMORY, 503),
        (FinishReason.EXPIRED, "no luck", 504),
        (FinishReason.REJECTED, "no luck", 503),
        (FinishReason.THROTTLED, "no luck", 429),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_before_the_first_token_has_its_status(
    frontend: FrontendProcess,
    monkeypatch: pytest.MonkeyPatch,
    reason: FinishReason,
    message: str,
    status: int,
    stream: bool,
) -> None:
    core = frontend.core

    def fail_instead() -> None:
        for client, of_client in core.running.items():
            done = [FinishedRequest(index, reason, message=message) for index in of_client]
            of_client.clear()
            core.send(client, EngineCoreOutputs(0, 0, time.monotonic(), finished=done))

    with monkeypatch.context() as patch:
        patch.setattr(core, "step", fail_instead)
        response = frontend.post(COMPLETIONS, prompt=PROMPT, stream=stream)
        assert response.status_code == status
        assert response.json()["error"]["message"] == message
        assert ("retry-after" in response.headers) is (status in (429, 503, 504))
    assert frontend.complete(PROMPT, max_tokens=1)["choices"]


class _Texts(ChunkEncoder):
    """An encoder that returns the text itself."""

    format = OPENAI_STREAM

    def encode(self, sequence: Sequence) -> bytes:
        return sequence.read_text().encode()

    def closing(self) -> bytes:
        return b""


class _Chunks:
    """A connection that stores what is written to it."""

    def __init__(self) -> None:
        self.is_paused = False
        self.has_chunks = True
        self.on_writable: Callable[[], None] | None = None
        self.written: list[bytes] = []

    def begin_stream(self) -> None:
        pass

    def write_chunk(self, data: bytes) -> None:
        self.written.append(data)


@on_event_loop
async def test_comments_are_sent_while_a_stream_is_idle(tmp_path: Path) -> None:
    sent: list[dict[str, Any]] = []
    disconnected = asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async with connected(engine_config(tmp_path)) as (client, core):
        request = SequenceRequest([5, 6], SamplingParams(max_tokens=2))
        group = await client.submit([request], request_id="r")
        connection = _Chunks()
        stream = EventStream(send, connection, keep_alive_s=0.02)
        running = asyncio.create_task(stream.run(receive, group, _Texts()))
        while len(connection.written) < 3:
            await asyncio.sleep(0.005)
        assert [message["type"] for message in sent] == ["http.response.start"]
        assert set(connection.written) == {b": keep-alive\n\n"}
        disconnected.set()
        await running
        core.receive()
        while not any(isinstance(message, AbortRequests) for message in core.received):
            await asyncio.sleep(0.005)
            core.receive()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]


@on_event_loop
async def test_a_rejection_after_the_headers_contains_a_retry_time(tmp_path: Path) -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    class Refused(_Texts):
        def encode(self, sequence: Sequence) -> bytes:
            raise_if_failed(sequence.read())
            return b""

    async with connected(engine_config(tmp_path)) as (client, core):
        request = SequenceRequest([5, 6], SamplingParams(max_tokens=2))
        group = await client.submit([request], request_id="r")
        stream = EventStream(send, _Chunks(), keep_alive_s=0.02)
        running = asyncio.create_task(stream.run(receive, group, Refused()))
        await advance_until(lambda: bool(sent and core.requests), core.receive)
        refusal = FinishedRequest(0, FinishReason.THROTTLED, message="too many", retry_after_s=6.5)
        core.send(b"client0", EngineCoreOutputs(0, 0, time.monotonic(), finished=[refusal]))
        await running
    event, done = sent[-1]["body"].removesuffix(b"\n\n").split(b"\n\n")
    error = json.loads(event.removeprefix(b"data: "))["error"]
    assert (error["code"], error["retry_after"]) == ("rate_limit_exceeded", 7)
    assert done == b"data: [DONE]"


class _Filled(_Texts):
    """An encoder whose chunks are templates without any other content."""

    def template(self) -> Template:
        return Template(b"", b"")


@pytest.mark.parametrize("encoder", [_Texts, _Filled])
@on_event_loop
async def test_unread_output_is_sent_as_one_chunk_when_the_client_reads_again(
    tmp_path: Path, encoder: type[_Texts]
) -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    prompt = smollm2_tokenizer().encode(PROMPT * 20)
    async with connected(engine_config(tmp_path)) as (client, core):
        request = SequenceRequest(prompt, SamplingParams(max_tokens=len(prompt)))
        group = await client.submit([request], request_id="r")
        connection = _Chunks()
        stream = EventStream(send, connection)
        running = asyncio.create_task(stream.run(receive, group, encoder()))
        await advance_until(lambda: bool(core.requests), core.receive)
        await advance_until(lambda: len(connection.written) > 2, core.step)
        connection.is_paused = True
        num_written = len(connection.written)
        await advance_until(lambda: not group.num_unfinished, core.step)
        assert len(connection.written) == num_written and not running.done()
        connection.is_paused = False
        assert connection.on_writable is not None
        connection.on_writable()
        await running
        assert connection.on_writable is None
        assert len(connection.written) == num_written + 1
        assert b"".join(connection.written).decode() == PROMPT * 20
        assert [message.get("body") for message in sent] == [None, b"data: [DONE]\n\n"]
