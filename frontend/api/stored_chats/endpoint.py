"""`POST /v1/chat/completions`, which stores the answers of requests with `store: true`."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.types import Receive

from ...client.engine_client import Delta, RequestGroup, Sequence
from ...http.errors import APIError, echo, json_response
from ...http.json_pieces import encode_whole
from ...http.routing import Asgi
from ..answer import Answer
from ..bodies.intake import Intake
from ..chats.answer import ChatAnswer, ChatChunks
from ..endpoint import NewAnswer, identify
from ..generation import PreparedPrompt, read_outputs, wait_for_end
from ..logprobs import Json
from ..routes.chat_completions import ChatCompletions
from ..schema import ChatCompletionRequest
from ..serving import Serving
from ..stored.metadata import verify_metadata
from ..streaming.event_stream import ChunkEncoder
from ..streaming.kept_outputs import KeptOutputs
from .records import ChatEntry, ChatRecords

logger = logging.getLogger(__name__)


class _KeptAnswer(ChatAnswer):
    """An answer whose outputs are collected while they are streamed, so that it can be stored."""

    def __init__(self, *fields: Any) -> None:
        super().__init__(*fields)
        self._fields = fields
        self.kept = KeptOutputs(len(self._group.sequences))

    def chunks(self) -> ChunkEncoder:
        """Return the encoder that writes the response as stream chunks."""
        return _KeptChunks(self) if self.request.store else super().chunks()

    def whole_with_new_parsers(self, outputs: list[Delta]) -> Json:
        """Return the complete response body of an answer that may have been streamed."""
        answer = ChatAnswer(*self._fields)
        answer.receipt_source = self.receipt_source
        return answer.whole(outputs) | {"object": "chat.completion"}


class _KeptChunks(ChatChunks):
    """Encodes a stream, and collects its outputs."""

    __slots__ = ("_kept",)

    def __init__(self, answer: _KeptAnswer) -> None:
        super().__init__(answer)
        self._is_plain = False
        self._kept = answer.kept

    def read(self, sequence: Sequence) -> Delta:
        """Return the new output of a sequence."""
        delta = super().read(sequence)
        self._kept.add(sequence.position, delta)
        return delta


class StoredChatCompletions(ChatCompletions):
    """The chat completions endpoint, with a store.

    An answer is stored before its client receives the end. If the store fails, the client receives the answer
    nevertheless.
    """

    answer_type = _KeptAnswer

    def __init__(self, serving: Serving, intake: Intake, records: ChatRecords) -> None:
        super().__init__(serving, intake)
        self._records = records

    async def prepare(
        self, request: ChatCompletionRequest, body_size: int, receive: Receive
    ) -> tuple[list[PreparedPrompt], NewAnswer[ChatCompletionRequest]]:
        """Return the encoded prompt, and the constructor of the answer."""
        if request.store:
            _verify_metadata(request.metadata)
        return await super().prepare(request, body_size, receive)

    async def _reply(
        self, answer: Answer[ChatCompletionRequest], group: RequestGroup, asgi: Asgi
    ) -> None:
        if not answer.request.store:
            await super()._reply(answer, group, asgi)
            return
        assert isinstance(answer, _KeptAnswer)
        owner: str = asgi.state["owner"]
        if answer.request.stream:
            chunks = answer.chunks()
            if group.recording is not None:
                chunks = identify(chunks, answer.envelope["id"], group, asgi)

            async def before_end() -> None:
                if (outputs := answer.kept.read()) is not None:
                    await self._store(answer, outputs, group.weight, owner)

            await self._stream(asgi).run(asgi.receive, group, chunks, before_end)
            return
        await wait_for_end(group, asgi.receive)
        content = await self._store(
            answer, read_outputs(group, shows_abort=answer.shows_abort), group.weight, owner
        )
        await json_response(content)(*asgi)

    async def _store(
        self, answer: _KeptAnswer, outputs: list[Delta], weight: int, owner: str
    ) -> Json:
        request, run = answer.request, self._serving.executor.run
        messages = request.messages or []

        def encode() -> tuple[Json, bytes, bytes]:
            content = answer.whole_with_new_parsers(outputs)
            return content, encode_whole(content), msgspec.json.encode(messages)

        content, data, sent = await run(weight + answer.prompt_weight, encode)
        entry = ChatEntry(content["id"], content["model"], request.metadata or {})
        try:
            await self._records.save(entry, data, sent, owner)
        except APIError as error:
            logger.warning("cannot store %s: %s", entry.id, error.message)
        return content


def _verify_metadata(metadata: dict[str, Any] | None) -> None:
    """Raise APIError 400 for metadata that cannot be stored."""
    for key, value in (metadata or {}).items():
        if not isinstance(value, str):
            raise APIError(
                400,
                f"values of metadata must be strings, got {echo(value)} for {echo(key)}",
                param="metadata",
            )
    verify_metadata(metadata)
