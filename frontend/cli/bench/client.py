"""Send streamed requests to a server with OpenAI's API and record when each piece of the answers arrives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import msgspec

from .datasets import Prompt, Session, Turn

TIMEOUT_S: Final = 6 * 3600.0
"""Maximum seconds that a request may take."""
_READ_BYTES: Final = 1 << 20
_QUOTED: Final = 200


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptTokensDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


@dataclass
class Answer:
    """The record of one request. Times are values of `time.perf_counter`, in seconds.

    Attributes:
        start: The time at which the request was sent.
        end: The time at which the answer ended.
        chunk_times: The times at which pieces of text arrived; only that of the end if the answer has no text.
        output_tokens: Generated tokens; the number of pieces if the server does not report them.
        prompt_tokens: Tokens of the prompt; 0 if the server does not report them.
        cached_tokens: Prompt tokens that the server found in a prefix cache.
        text: The generated text.
        error: The reason why the request failed, or None.
    """

    start: float = 0.0
    end: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    error: str | None = None

    def read(self, line: bytes) -> None:
        """Record a line of the stream.

        Raises:
            msgspec.MsgspecError: The line is not a valid event.
        """
        event = _decode_event(line)
        if event.error is not None:
            self.error = str(event.error)
        for choice in event.choices[:1]:
            delta = choice.delta
            thought = (delta.reasoning_content or delta.reasoning or "") if delta else ""
            text = choice.text or (delta.content if delta else None) or ""
            # Tokens may have no text. An answer of only such tokens arrives when it ends.
            if text or thought or (choice.finish_reason and not self.chunk_times):
                self.chunk_times.append(time.perf_counter())
                self.text += text
        if (usage := event.usage) is not None:
            self.output_tokens = usage.completion_tokens
            self.prompt_tokens = usage.prompt_tokens
            details = usage.prompt_tokens_details
            self.cached_tokens = (details and details.cached_tokens) or 0


@dataclass(frozen=True)
class Endpoint:
    """The server and endpoint that requests are sent to, and the fields that all requests have.

    Attributes:
        url: The server's URL without `/v1`, or `unix:` and the path of its socket.
        model: The model's name.
        is_chat: Use chat completions rather than completions.
        api_key: The API key that is sent with each request, or None.
        fields: Further fields of the body of each request.
    """

    url: str
    model: str
    is_chat: bool = False
    api_key: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def full_url(self) -> str:
        """The URL that requests are posted to."""
        base = "http://localhost" if self.url.startswith("unix:") else self.url
        return base + ("/v1/chat/completions" if self.is_chat else "/v1/completions")

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Yield an HTTP client without a limit on its number of connections."""
        connector: aiohttp.BaseConnector
        if self.url.startswith("unix:"):
            connector = aiohttp.UnixConnector(self.url.removeprefix("unix:"), force_close=True)
        else:
            # llama-server closes a connection after a streamed answer without announcing it, so each request opens a
            # new one. With TLS the handshakes would take longer than most first tokens, so connections are reused.
            force_close = not self.url.startswith("https:")
            connector = aiohttp.TCPConnector(limit=0, force_close=force_close)
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        async with aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            read_bufsize=_READ_BYTES,
        ) as client:
            yield client

    def body(self, prompt: Prompt | list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
        """Return the body of a request for a prompt (messages if this is a chat)."""
        return {
            "model": self.model,
            "messages" if self.is_chat else "prompt": prompt,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }


async def ask(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    """Send one request and return the record of its answer. Failures are recorded in the answer, not raised."""
    answer = Answer(start=time.perf_counter())
    try:
        async with client.post(url, json=body) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:_QUOTED]}"
                return answer
            rest = b""
            async for data in response.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: {"):
                        answer.read(line[6:])
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError, OSError) as error:
        answer.error = repr(error)
    answer.end = time.perf_counter()
    if answer.error is None and not answer.chunk_times:
        answer.error = "the server sent no answer"
    answer.output_tokens = answer.output_tokens or len(answer.chunk_times)
    return answer


async def run_sessions(
    endpoint: Endpoint,
    sessions: Sequence[Session],
    *,
    starts: Sequence[float] | None = None,
    max_concurrency: int | None = None,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> tuple[list[Answer], float]:
    """Send the requests of all sessions.

    Args:
        endpoint: The destination of the requests.
        sessions: The sessions. The requests of a session are sent one after another, each with all earlier answers.
        starts: The time at which each session starts, in seconds from now, in ascending order; by default all start
            immediately.
        max_concurrency: Maximum concurrent sessions. A session above the limit starts when another one ends.
        on_answer: Called after each request.

    Returns:
        The answers, in the order in which they ended, and the total duration in seconds.
    """
    answers: list[Answer] = []
    places = asyncio.Semaphore(max_concurrency or len(sessions))

    async def run(client: aiohttp.ClientSession, session: Session, start: float) -> None:
        await asyncio.sleep(begin + start - time.perf_counter())
        async with places:
            history = _History(endpoint.is_chat, session)
            for turn in session.turns:
                prompt = history.prompt(turn)
                answer = await ask(
                    client, endpoint.full_url, endpoint.body(prompt, turn.max_tokens)
                )
                answers.append(answer)
                on_answer(answer)
                if answer.error is not None:
                    return
                history.add_answer(answer.text)

    async with endpoint.connect() as client:
        begin = time.perf_counter()
        await asyncio.gather(
            *map(lambda s, at: run(client, s, at), sessions, starts or [0.0] * len(sessions))
        )
        return answers, time.perf_counter() - begin


class _History:
    """The conversation of a session so far: a list of messages for a chat, otherwise one text."""

    def __init__(self, is_chat: bool, session: Session) -> None:
        self._is_chat = is_chat
        system = session.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]
        self._text = "" if system is None else system + "\n"
        self._is_single = len(session.turns) == 1 and system is None

    def prompt(self, turn: Turn) -> Any:
        """Add the prompt of a turn, and return the whole conversation as the prompt of the next request."""
        if not self._is_chat and self._is_single:
            return turn.prompt
        assert isinstance(turn.prompt, str)
        if self._is_chat:
            self._messages.append({"role": "user", "content": turn.prompt})
            return list(self._messages)
        self._text += turn.prompt
        return self._text

    def add_answer(self, text: str) -> None:
        """Add the answer to the last turn's prompt."""
        self._messages.append({"role": "assistant", "content": text})
        self._text += text
