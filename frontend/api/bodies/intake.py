"""Receive request bodies within the frontend's limits, and decode them without blocking the event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...client.executor import request_digest
from ...http.errors import internal_error, unavailable
from ...http.routing import Asgi
from ..dialects.azure import find_deployment
from ..inputs.named_media import fill_in_media
from ..inputs.stored_files import fill_in_files
from ..openapi import accepts
from ..serving import Serving
from .body import Body, BodyDecoder, make_decoder, read_body
from .decoder_pool import DecoderPool
from .form import FormDecoder, FormFile, find_boundary, parse_form
from .messages import unpack
from .request_memory import MemoryLease
from .structure import FREE_BYTES

T = TypeVar("T", bound=msgspec.Struct)

POISON_BODY: Final = (
    "a server process crashed while parsing this request, so it is rejected for some minutes; "
    "change the request"
)

MAX_WAITING_CHARACTERS: Final = 32 * 1024 * 1024
"""Maximum characters of long texts that wait for a thread. More would take many seconds to tokenize."""

CHARACTERS_PER_S: Final = 4 * 1024 * 1024
"""Approximate tokenization speed of the two threads for long texts, for `Retry-After`."""

THREAD_BYTES: Final = 512 * 1024
THREAD_VALUES: Final = 1 << 16
THREAD_OBJECTS: Final = 1 << 14
"""Maximum bytes, values, and strings, lists and objects together of a body that a thread decodes.

At these limits it blocks all other threads for a few milliseconds. A process decodes larger bodies.
"""


class Intake:
    """Receives and decodes all request bodies of one frontend."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        limits = serving.config.frontend
        self._max_body_bytes = limits.max_body_bytes
        self._is_strict = limits.strict
        self._decoders: dict[type[msgspec.Struct], BodyDecoder[Any]] = {}
        self._pool = DecoderPool(
            strict=limits.strict, log_level=limits.log_level, log_format=limits.log_format
        )

    def lease(self) -> MemoryLease:
        """Return a request's lease on the memory for large bodies. Enter it as a context until the request ends."""
        return self._serving.request_memory.lease()

    async def receive(
        self, source: Asgi | Request, schema: type[T], lease: MemoryLease
    ) -> tuple[T, int]:
        """Return the body, decoded into `schema`, and its size in bytes.

        A model that the path names replaces the one in the body. Stored files and media that its messages refer to are
        filled in, and are a part of its size.

        Raises:
            APIError: The body is invalid, too large, or too complex (4xx); it crashed a frontend before (500); there is
                no room for it (503); a stored file does not exist (404) or no media have a name (400).
            ClientDisconnected: The client closed the connection first.
        """
        body, size = await self._decode(source, schema, lease)
        if model := find_deployment(source.scope):
            body.model = model  # type: ignore[attr-defined]
        if messages := getattr(body, "messages", None):
            owner = source.scope.get("state", {}).get("owner", "")
            for fill_in in (fill_in_files, fill_in_media):
                size += await fill_in(self._serving, messages, size, owner, lease)
        return body, size

    async def _decode(
        self, source: Asgi | Request, schema: type[T], lease: MemoryLease
    ) -> tuple[T, int]:
        body = await read_body(source.scope, source.receive, self._max_body_bytes, lease)
        self._refuse_poison()
        if schema not in self._decoders:
            self._decoders[schema] = make_decoder(schema, self._is_strict)
        decoder: BodyDecoder[T] = self._decoders[schema]
        executor = self._serving.executor
        if body.size <= FREE_BYTES:
            return executor.call(decoder.decode, body.join()), body.size
        waiting = executor.num_waiting_characters
        if waiting > MAX_WAITING_CHARACTERS:
            raise unavailable(
                f"{waiting} characters of other requests are waiting to be tokenized, but at most "
                f"{MAX_WAITING_CHARACTERS} are allowed",
                waiting / CHARACTERS_PER_S,
            )
        if _is_for_thread(body):
            return await executor.in_thread(decoder.decode, body.join()), body.size
        reply = await self._pool.decode(schema, body)
        return await executor.in_thread(unpack, reply), body.size

    async def receive_bytes(self, source: Asgi | Request) -> bytes:
        """Return the bytes of a body that another route then receives again.

        Raises:
            APIError: The body is too large (413), or there is no room for it (503).
            ClientDisconnected: The client closed the connection first.
        """
        with self.lease() as lease:
            return (
                await read_body(source.scope, source.receive, self._max_body_bytes, lease)
            ).join()

    async def receive_form(
        self, source: Asgi | Request, decoder: FormDecoder[T], lease: MemoryLease
    ) -> tuple[T, dict[str, FormFile]]:
        """Return the decoded values of a form, and its files. A model that the path names replaces the one in it.

        Raises:
            APIError: The form is invalid or too large (4xx); it crashed a frontend before (500); there is no room for
                it (503).
            ClientDisconnected: The client closed the connection first.
        """
        boundary = find_boundary(source.scope)
        body = await read_body(
            source.scope, source.receive, self._max_body_bytes, lease, is_json=False
        )
        self._refuse_poison()
        form = await self._serving.executor.in_thread(parse_form, body, boundary)
        if model := find_deployment(source.scope):
            form.values["model"] = [model]
        return decoder.decode(form.values), form.files

    def _refuse_poison(self) -> None:
        watch = self._serving.engine.watch
        if watch is None or not watch.status.poison_bodies:
            return
        if request_digest.get() in watch.status.poison_bodies:
            raise internal_error(POISON_BODY, may_retry=False)


def _is_for_thread(body: Body) -> bool:
    structure = body.structure
    return body.size <= THREAD_BYTES and (
        structure is None
        or (
            structure.num_values <= THREAD_VALUES
            and structure.num_strings + structure.num_containers <= THREAD_OBJECTS
        )
    )


class RouteHandlers:
    """The handlers of some routes, which read the bodies of their requests from one intake."""

    def __init__(self, serving: Serving, intake: Intake) -> None:
        self._serving = serving
        self._intake = intake


R = TypeVar("R", bound=RouteHandlers)


def reads(
    schema: type[T],
) -> Callable[
    [Callable[[R, Request, T, int], Awaitable[Response]]],
    Callable[[R, Request], Awaitable[Response]],
]:
    """Decorate a handler that gets the decoded JSON body of a request, and the size of the body in bytes.

    The memory of the body is leased until the handler returns.
    """

    def declare(
        handler: Callable[[R, Request, T, int], Awaitable[Response]],
    ) -> Callable[[R, Request], Awaitable[Response]]:
        @accepts(schema)
        @wraps(handler)
        async def answer(self: R, http: Request) -> Response:
            intake = self._intake
            with intake.lease() as lease:
                body, size = await intake.receive(http, schema, lease)
                return await handler(self, http, body, size)

        return answer

    return declare
