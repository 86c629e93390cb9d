"""The WebSocket `/v1/responses`: responses that are created one after another on the same connection."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import msgspec
from starlette.types import Receive, Scope, Send

from ...http.errors import APIError, wrong
from ...http.websocket import INTERNAL_ERROR, Message, WebSocket, WebSocketClosed, open_websocket
from ..bodies.intake import RouteHandlers
from ..responses.states import KEPT, KeptResponses
from ..serving import Serving
from .turn import Turn, send_api_error

logger = logging.getLogger(__name__)

CREATE: Final = "response.create"
STEER: Final = "response.steer"
PROCESSED: Final = "response.processed"
"""Codex reports with it that it has read a response."""


class _Event(msgspec.Struct):
    """The fields of a client's event that decide how it is handled."""

    type: Any = None
    previous_response_id: Any = None
    input: msgspec.Raw = msgspec.Raw(b"null")


class ResponsesSocket(RouteHandlers):
    """The route of the WebSocket."""

    is_websocket = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open the WebSocket, and answer its events until it is closed."""
        serving = self._serving
        serving.verify_serving()
        max_bytes = serving.config.frontend.max_body_bytes
        with await open_websocket(scope, send, max_bytes, self._intake.lease) as socket:
            await _Session(serving, socket, scope).run()


class _Session:
    """An open WebSocket. One response runs at a time, and one more may wait."""

    def __init__(self, serving: Serving, socket: WebSocket, handshake: Scope) -> None:
        self._serving = serving
        self._socket = socket
        self._handshake = handshake
        max_bytes = serving.config.frontend.max_body_bytes
        self._kept = KeptResponses(serving.request_memory, max_bytes)
        self._waiting: asyncio.Queue[Message | None] = asyncio.Queue(1)

    async def run(self) -> None:
        """Answer events until the WebSocket is closed."""
        worker = asyncio.create_task(self._answer_in_turn())
        try:
            while True:
                await self._handle(await self._socket.receive())
        except WebSocketClosed:
            pass
        except BaseException:
            worker.cancel()
            raise
        finally:
            while not self._waiting.empty():
                if (message := self._waiting.get_nowait()) is not None:
                    Turn(self._socket, message).release()
            self._waiting.put_nowait(None)
            await asyncio.wait({worker})
            self._kept.clear()

    async def _handle(self, message: Message) -> None:
        try:
            event = _read_event(message.text)
        except APIError as error:
            Turn(self._socket, message).release()
            send_api_error(self._socket, error)
            return
        if event.type == CREATE:
            await self._waiting.put(message)
            return
        Turn(self._socket, message).release()
        if event.type == STEER:
            self._refuse_steer(event)

    async def _answer_in_turn(self) -> None:
        assert self._serving.app is not None
        try:
            while (message := await self._waiting.get()) is not None:
                turn = Turn(self._socket, message)
                with self._socket.turn():
                    await turn.answer(self._serving.app, self._handshake, {KEPT: self._kept})
        except Exception:
            logger.exception("a WebSocket failed")
            self._socket.close(INTERNAL_ERROR, "internal server error")

    def _refuse_steer(self, event: _Event) -> None:
        refusal = {
            "type": "response.steer.failed",
            "sequence_number": 0,
            "error": {
                "code": "steering_not_supported",
                "message": "this server does not change a response that it is writing; "
                "send the input with the next response.create",
            },
            "steer": {"previous_response_id": event.previous_response_id, "input": event.input},
        }
        self._socket.send(msgspec.json.encode(refusal))


def _read_event(text: bytes) -> _Event:
    try:
        event = msgspec.json.decode(text, type=_Event)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise APIError(400, f"the message must be a JSON object: {error}") from None
    known = (CREATE, STEER, PROCESSED)
    if event.type not in known:
        raise wrong("type", f"one of {', '.join(known)}", event.type)
    return event
