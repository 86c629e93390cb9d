"""What completions and chat completions do alike: from the body to the answer, whole or streamed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic

from starlette.types import Receive, Scope, Send

from ..engine_client import RequestGroup
from .answer import Answer, Request
from .body import BodyDecoder, read_body
from .deadline import read_deadline
from .errors import json_response
from .event_stream import EventStream
from .generation import (
    PreparedPrompt,
    collect,
    find_data_parallel_rank,
    find_tenant,
    submit,
    verify_streaming,
)
from .logprobs import Json
from .serving import Serving

NewAnswer = Callable[[RequestGroup, Json], Answer[Request]]
"""Makes the answer of the sequences and the envelope."""


class Endpoint(ABC, Generic[Request]):
    """An endpoint that generates, as an ASGI application on a `Connection`."""

    def __init__(self, serving: Serving, request_type: type[Request], id_prefix: str) -> None:
        self._serving = serving
        self._decoder = BodyDecoder(request_type, serving.config.frontend.strict)
        self._id_prefix = id_prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        serving, state = self._serving, scope["state"]
        deadline = read_deadline(scope, serving.config.frontend.default_deadline_s)
        body = await read_body(scope, receive, serving.config.frontend.max_body_bytes)
        request = self._decoder.decode(body)
        serving.verify_model(request.model)
        serving.verify_serving()
        verify_streaming(request)
        tenant = find_tenant(request, state["tenant"])
        rank = find_data_parallel_rank(scope, serving.num_replicas)
        prompts, new_answer = await self._prepare(request, len(body))
        request_id = state["request_id"]
        group = await submit(
            serving,
            request,
            prompts,
            request_id,
            tenant=tenant,
            deadline=deadline,
            data_parallel_rank=rank,
        )
        try:
            answer = new_answer(
                group,
                {
                    "id": f"{self._id_prefix}-{request_id}",
                    "object": self._object_name(request),
                    "created": int(time.time()),
                    "model": serving.served_name,
                    "system_fingerprint": serving.fingerprint,
                },
            )
            if request.stream:
                stream = EventStream(send, state["connection"])
                await stream.run(receive, group, answer.chunks())
            else:
                outputs = await collect(group, receive)
                await json_response(answer.whole(outputs))(scope, receive, send)
        finally:
            group.abort()

    @abstractmethod
    def _object_name(self, request: Request) -> str: ...

    @abstractmethod
    async def _prepare(
        self, request: Request, body_size: int
    ) -> tuple[list[PreparedPrompt], NewAnswer[Request]]:
        """Verified parameters and encoded prompts. Raises APIError 400, ParameterError."""
