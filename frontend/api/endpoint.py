"""The common part of completions and chat completions: from the request body to the response, whole or streamed."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import UnionType
from typing import Any, ClassVar, Generic

import msgspec
from starlette.types import Message, Receive, Scope, Send

from ..client.beam_search import BeamSearch
from ..client.engine_client import RequestGroup
from ..http.errors import APIError, json_response, renaming
from ..http.request_headers import read_deadline
from ..http.routing import Asgi
from ..model_source.lora_registry import LoraScale
from .answer import Answer, Outputs, Request
from .bodies.body import ClientDisconnected
from .bodies.intake import RouteHandlers
from .bodies.request_memory import MemoryLease
from .durable.event_ids import IdentifiedChunks
from .durable.event_positions import MAX_SEQUENCES
from .durable.keeper import Keeper
from .durable.kept_connections import find_record
from .durable.records import RequestRecord, replay_body
from .durable.recovery import StartGroup
from .durable.resumption import Resumption
from .generation import (
    ClientWatch,
    PreparedPrompt,
    beam_search_params,
    find_origin,
    find_request_id,
    read_outputs,
    submit,
    verify_streamed_logprobs,
    verify_streaming,
    wait_for_end,
)
from .inputs.hidden_states import num_answer_bytes
from .logprobs import Json
from .receipts.receipt import ReceiptSource
from .streaming.event_stream import ChunkEncoder, EventStream

NewAnswer = Callable[[Outputs, Json], Answer[Request]]
"""Function from the sequences and the envelope to the answer."""


class Endpoint(RouteHandlers, ABC, Generic[Request]):
    """An endpoint that generates text, as an ASGI application.

    Attributes:
        body_schema: The schema of the bodies that it accepts.
        id_prefix: The prefix of the IDs of its answers.
        object_type: The value of the answers' field `object`, unless that depends on the request.
    """

    body_schema: type[msgspec.Struct] | UnionType
    id_prefix: ClassVar[str]
    object_type: ClassVar[str] = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        with self._intake.lease() as lease:
            await self._answer(Asgi(scope, receive, send), lease)

    async def _answer(self, asgi: Asgi, lease: MemoryLease) -> None:
        keeper = Keeper(self._serving, asgi.scope)
        if (position := keeper.read_position()) is not None:
            resumption = await keeper.find_resumption(position)
            with resumption:
                await self.resume(resumption, asgi, lease)
            return
        deadline = read_deadline(asgi.scope, self._serving.config.frontend.default_deadline_s)
        request, body_size = await self._receive(
            asgi._replace(receive=keeper.watch_body(asgi.receive)), lease
        )
        await self._generate(asgi, lease, request, body_size, deadline, keeper)

    async def _generate(
        self,
        asgi: Asgi,
        lease: MemoryLease,
        request: Request,
        body_size: int,
        deadline: float,
        keeper: Keeper | None = None,
    ) -> None:
        """Answer a request until its deadline in CLOCK_MONOTONIC seconds. The body has about `body_size` bytes.

        Without a `keeper` the request is not recorded.
        """
        serving, state = self._serving, asgi.state
        serving.verify_model(request.model)
        serving.verify_serving()
        verify_streaming(request)
        origin = find_origin(asgi.scope, request, deadline, serving.num_replicas)
        if (greeting := self._greeting(request)) is not None:
            await json_response(greeting)(*asgi)
            return
        prompts, new_answer = await self._prepare(request, body_size, asgi.receive)
        verify_streamed_logprobs(request, prompts, serving)
        lease.count_media(sum(prompt.num_image_bytes * prompt.params.n for prompt in prompts))
        wanted = ((prompt.params, len(prompt.token_ids)) for prompt in prompts)
        lease.count_media(num_answer_bytes(wanted, serving.config))
        request_id, recent = find_request_id(request, state), serving.recent_prompts
        first, owner = prompts[0], origin.cache_owner
        nearest = recent.find_nearest(owner, first.token_ids) if request.include_receipt else None
        recent.add(owner, first.token_ids)
        start = partial(submit, serving, request, prompts, request_id, origin)
        beams = beam_search_params(request, prompts, serving.config)
        if beams is None:
            keeper = keeper or Keeper(serving, asgi.scope, is_on=False)
            record = keeper.make_record(
                prompts,
                prefix=self.id_prefix_of(request),
                fingerprint=serving.find_fingerprint(request.model, request.lora),
                origin=origin,
            )
            if (same := await keeper.find_same_request(record)) is not None:
                with same:
                    await self.resume(same, asgi, lease)
                return
            # The client verifies the parameters again, with the defaults that were filled in.
            with keeper, renaming(request.sent_name):
                group = await start(begin_recording=keeper.begin_recording(record))
            answer_id, created = record.answer_id, record.created
        else:
            end_token_ids = serving.config.model.eos_token_ids
            search = BeamSearch(serving.engine, beams, end_token_ids, request_id)
            group = await _finish_search(search, start, asgi.receive)
            answer_id, created = f"{self.id_prefix_of(request)}-{request_id}", int(time.time())
        try:
            answer = new_answer(group, self._envelope(request, answer_id, created))
            if request.include_receipt:
                answer.receipt_source = ReceiptSource(request_id, first, nearest)
            with serving.connections.keep(asgi, answer_id if group.recording is not None else ""):
                await self._reply(answer, group, asgi)
        finally:
            group.leave()

    async def resume(
        self, resumption: Resumption, asgi: Asgi, lease: MemoryLease | None = None
    ) -> None:
        """Answer a request with the output of another request that was or is being generated.

        Raises:
            APIError: The recorded request can no longer be read, or has failed.
        """
        if lease is None:
            with self._intake.lease() as lease:
                await self.resume(resumption, asgi, lease)
            return
        record = resumption.record
        owner = asgi.state["owner"]
        request, prompts, new_answer = await self._prepare_again(record, owner, asgi.receive, lease)
        group = await resumption.mirror(self._serving, request, prompts)
        try:
            answer = new_answer(group, self._envelope(request, record.answer_id, record.created))
            with self._serving.connections.keep(asgi, record.answer_id):
                await self._send_rest(resumption, answer, group, asgi)
        finally:
            group.abort()

    async def _send_rest(
        self, resumption: Resumption, answer: Answer[Request], group: RequestGroup, asgi: Asgi
    ) -> None:
        """Send the part of a recorded answer that the client does not have."""
        if not answer.request.stream:
            resumption.open(group)
            await self._send_whole(answer, group, asgi)
            return
        chunks = answer.chunks()
        await resumption.read_silently(group, chunks)
        chunks = identify(chunks, resumption.record.answer_id, group, asgi)
        await self._stream(asgi).run(asgi.receive, group, resumption.without_end(chunks))

    async def continue_request(self, record: RequestRecord, owner: str, start: StartGroup) -> None:
        """Generate the rest of a recorded request whose frontend has exited. It may read the files of `owner`.

        Raises:
            APIError: The request can no longer be prepared, or the engine does not accept it.
        """
        with self._intake.lease() as lease:
            request, prompts, _ = await self._prepare_again(record, owner, _never, lease)
            # The adapter may have been replaced in the meantime.
            self._verify_same_model(record, request.model, request.lora)
            group = await start(request, prompts)
            await group.wait_for_end()

    async def record_failure(self, request_id: str, owner: str, error: APIError) -> bool:
        """Return False, because the token log reports the error to the client."""
        return False

    async def _prepare_again(
        self, record: RequestRecord, owner: str, receive: Receive, lease: MemoryLease
    ) -> tuple[Request, list[PreparedPrompt], NewAnswer[Request]]:
        """Prepare a recorded request again, and return the result of `prepare`.

        Raises:
            APIError: The request was answered by another model (410), or can no longer be prepared.
        """
        scope: Scope = {"type": "http", "method": "POST", "path": record.path, "headers": []}
        scope["state"] = {"owner": owner}
        asgi = Asgi(scope, replay_body(record.body, receive), _drop)
        request, body_size = await self._receive(asgi, lease)
        self._verify_same_model(record, request.model, request.lora)
        prompts, new_answer = await self._prepare(request, body_size, receive)
        return request, prompts, new_answer

    async def _prepare(
        self, request: Request, body_size: int, receive: Receive
    ) -> tuple[list[PreparedPrompt], NewAnswer[Request]]:
        """Return the result of `prepare`. Errors name the fields as the client did."""
        with renaming(request.sent_name):
            return await self.prepare(request, body_size, receive)

    def _verify_same_model(
        self, record: RequestRecord, name: str | None, scales: Sequence[LoraScale] | None = None
    ) -> None:
        """Raise APIError 410 if `name` with `scales` now means other weights than when it was recorded."""
        if record.fingerprint != self._serving.find_fingerprint(name, scales):
            raise APIError(
                410,
                "Another model, adapter or version started the answer to this request; send the request "
                "again",
            )

    async def _reply(self, answer: Answer[Request], group: RequestGroup, asgi: Asgi) -> None:
        if not answer.request.stream:
            await self._send_whole(answer, group, asgi)
            return
        chunks = answer.chunks()
        if group.recording is not None:
            chunks = identify(chunks, answer.envelope["id"], group, asgi)
        await self._stream(asgi).run(asgi.receive, group, chunks)

    def _stream(self, asgi: Asgi) -> EventStream:
        """Return the stream to a client."""
        silence_s = self._serving.config.frontend.max_silence_s
        return EventStream(asgi.send, asgi.state["connection"], silence_s, find_record(asgi))

    async def _send_whole(self, answer: Answer[Request], group: RequestGroup, asgi: Asgi) -> None:
        await wait_for_end(group, asgi.receive)
        response = await self._serving.executor.run(
            group.weight + answer.prompt_weight,
            lambda: json_response(
                answer.whole(read_outputs(group, shows_abort=answer.shows_abort)),
                headers=answer.headers(),
            ),
        )
        await response(*asgi)

    def _envelope(self, request: Request, answer_id: str, created: int) -> Json:
        return {
            "id": answer_id,
            "object": self.object_name(request),
            "created": created,
            "model": self._serving.answering_model(request.model),
            "system_fingerprint": self._serving.find_fingerprint(request.model, request.lora),
        }

    async def _receive(self, asgi: Asgi, lease: MemoryLease) -> tuple[Request, int]:
        """Return the request and the size of its body in bytes.

        Raises:
            APIError: The body is too large or invalid (4xx).
        """
        schema: Any = self.body_schema
        body, size = await self._intake.receive(asgi, schema, lease)
        return await self._translate(body, size), size

    async def _translate(self, body: Any, size: int) -> Request:
        """Return a body of `size` bytes as a request. Dialects translate it.

        Raises:
            APIError: A field is invalid; it is named as in the body (400).
        """
        request: Request = body
        return request

    def _greeting(self, request: Request) -> Json | None:
        """Return the response to a request that asks for no text; None for all other requests."""
        return None

    def id_prefix_of(self, request: Request) -> str:
        """Return the prefix of the answer's ID."""
        return self.id_prefix

    def object_name(self, request: Request) -> str:
        """Return the value of the response's field `object`."""
        return self.object_type

    @abstractmethod
    async def prepare(
        self, request: Request, body_size: int, receive: Receive
    ) -> tuple[list[PreparedPrompt], NewAnswer[Request]]:
        """Return the encoded prompts with verified parameters, and the constructor of the answer.

        Raises:
            APIError: The request is invalid (400).
            ParameterError: A parameter is invalid.
        """


class SharedEndpoint(Endpoint[Request]):
    """An endpoint at a path that several APIs have. It passes each request to the endpoint of one of them."""

    @abstractmethod
    def endpoint_of(self, request: Request) -> Endpoint[Any]:
        """Return the endpoint that answers a request."""

    def id_prefix_of(self, request: Request) -> str:
        """Return the prefix of the answer's ID."""
        return self.endpoint_of(request).id_prefix_of(request)

    def object_name(self, request: Request) -> str:
        """Return the value of the response's field `object`."""
        return self.endpoint_of(request).object_name(request)

    async def prepare(
        self, request: Request, body_size: int, receive: Receive
    ) -> tuple[list[PreparedPrompt], NewAnswer[Request]]:
        """Return the encoded prompts, and the constructor of the answer."""
        return await self.endpoint_of(request).prepare(request, body_size, receive)


def identify(chunks: ChunkEncoder, answer_id: str, group: RequestGroup, asgi: Asgi) -> ChunkEncoder:
    """Return an encoder that adds event IDs, or records them if this format has none. The request is recorded."""
    sent = find_record(asgi)
    if len(group.sequences) > MAX_SEQUENCES or not (chunks.format.has_ids or sent):
        return chunks
    return IdentifiedChunks(chunks, answer_id, group, sent)


async def _drop(message: Message) -> None:
    """Drop a message: a request that is prepared again sends nothing meanwhile."""


async def _never() -> Message:
    """Wait forever: a request that is continued after a crash has no client."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def _finish_search(
    search: BeamSearch, start: Callable[..., Awaitable[RequestGroup]], receive: Receive
) -> RequestGroup:
    """Return the results of a beam search.

    Raises:
        APIError: A step failed.
        ClientDisconnected: The client closed the connection first.
    """
    with ClientWatch(receive, search) as watch:
        try:
            return await start(search=search)
        except APIError:
            if watch.disconnected:
                raise ClientDisconnected from None
            raise
