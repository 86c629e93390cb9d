"""SGLang's sessions, in which a prompt continues the tokens of an earlier request.

The tokens of each finished request are in the store, so that all API servers continue it.
"""

from __future__ import annotations

import secrets
import time
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from ....client.engine_client import Delta
from ....http.errors import bad_request, echo, json_response, wrong
from ...bodies.intake import Intake, RouteHandlers, reads
from ...schema.sglang import (
    SglangCloseSessionRequest,
    SglangOpenSessionRequest,
    SglangSessionParams,
)
from ...serving import Serving
from ...stored.records import Records, owner_of
from .request import SglangPrompt

MAX_ID: Final = 128
"""Maximum characters of the ID of a session."""

_NOT_IN_STREAMING: Final = ("offset", "replace", "drop_previous_output")


class Session(msgspec.Struct):
    """The state of an open session.

    Attributes:
        is_streaming: True if each request continues the one before.
        timeout_s: Seconds without a request after which the session is closed; None for no limit.
        used_at: The time of its last request, in seconds since 1970.
        latest: The ID of its last finished request.
    """

    is_streaming: bool
    timeout_s: float | None
    used_at: float
    latest: str = ""


class Turn(msgspec.Struct):
    """A request within a session.

    Attributes:
        session_id: The ID of the session.
        session: The session.
        owner: The owner of the session.
        continues: The ID of the request that it continues; "" for none.
        history: The tokens that it continues.
    """

    session_id: str
    session: Session
    owner: str
    continues: str
    history: npt.NDArray[np.int32]


class FinishedTurn(msgspec.Struct, array_like=True):
    """A finished request as the store has it, with the tokens of its prompt and of its output."""

    rid: str
    continues: str
    prompt: bytes
    output: bytes


class Sessions(RouteHandlers):
    """Opens and closes sessions, and reads and writes the tokens of their requests."""

    def __init__(self, serving: Serving, intake: Intake) -> None:
        super().__init__(serving, intake)
        self._sessions = Records(serving.store, "sglang.session", "The session")
        self._turns = Records(serving.store, "sglang.turn", "The request")

    @reads(SglangOpenSessionRequest)
    async def open(self, http: Request, body: SglangOpenSessionRequest, size: int) -> Response:
        """Open a session and return its ID."""
        owner, session_id = owner_of(http), body.session_id
        if session_id is None:
            session_id = secrets.token_hex(16)
        elif not 0 < len(session_id) <= MAX_ID:
            raise wrong("session_id", f"1 to {MAX_ID} characters", session_id)
        elif await self._find(session_id, owner) is not None:
            raise bad_request("session_id", f"names a session that is open: {echo(session_id)}")
        if body.timeout is not None and body.timeout <= 0:
            raise wrong("timeout", "greater than 0", body.timeout)
        session = Session(bool(body.streaming), body.timeout, time.time())
        await self._sessions.put(session_id, session, owner)
        return json_response(session_id)

    @reads(SglangCloseSessionRequest)
    async def close(self, http: Request, body: SglangCloseSessionRequest, size: int) -> Response:
        """Close a session. An ID of no session has no effect."""
        await self._delete(body.session_id, owner_of(http))
        return Response()

    async def find_turn(
        self, params: SglangSessionParams, request: SglangPrompt, owner: str
    ) -> Turn:
        """Return the turn of a request with these parameters.

        Raises:
            APIError: There is no such session or request, or the request cannot be part of one (400).
        """
        if request.is_list or request.num_outputs > 1:
            raise bad_request("session_params", "needs a request with one prompt and n=1")
        if request.embeds is not None or request.media is not None:
            raise bad_request("session_params", "needs text or input_ids without media")
        session_id = params.id or ""
        session = await self._find(session_id, owner)
        if session is None:
            raise bad_request("session_params.id", f"names no open session: {echo(session_id)}")
        rid = params.rid or ""
        if session.is_streaming:
            for name in _NOT_IN_STREAMING:
                if getattr(params, name):
                    raise bad_request(
                        f"session_params.{name}", "cannot be used in a streaming session"
                    )
            rid = session.latest
        elif params.replace and not rid:
            await self._turns.delete_children(session_id, owner)
        history = np.empty(0, np.int32)
        if rid:
            data = await self._turns.find_data(_key(session_id, rid), owner)
            if data is None:
                raise bad_request(
                    "session_params.rid", f"names no finished request of the session: {echo(rid)}"
                )
            turn = _decode(data)
            text = turn.prompt if params.drop_previous_output else turn.prompt + turn.output
            history = np.frombuffer(text, "<i4").astype(np.int32)
            if params.replace:
                await self._delete_later(session_id, rid, owner)
        if params.offset:
            history = history[: params.offset]
        return Turn(session_id, session, owner, rid, history)

    async def save_turn(
        self, turn: Turn, rid: str, prompt: npt.NDArray[np.int32], output: Delta
    ) -> None:
        """Store the tokens of a finished request, unless the session was closed.

        The next request of a streaming session does not continue an aborted one, but the one before.

        Raises:
            APIError: They are too many, or the store does not answer (503).
        """
        is_dropped = turn.session.is_streaming and output.finish_reason == "abort"
        if is_dropped or await self._find(turn.session_id, turn.owner) is None:
            return
        finished = FinishedTurn(rid, turn.continues, _bytes_of(prompt), _bytes_of(output.token_ids))
        data = msgspec.msgpack.encode(finished)
        key = _key(turn.session_id, rid)
        await self._turns.put(key, data, turn.owner, parent=turn.session_id)
        if turn.session.is_streaming and turn.session.latest not in ("", rid):
            await self._turns.delete(_key(turn.session_id, turn.session.latest), turn.owner)
        session = msgspec.structs.replace(turn.session, used_at=time.time(), latest=rid)
        await self._sessions.put(turn.session_id, session, turn.owner)

    async def _find(self, session_id: str, owner: str) -> Session | None:
        """Return an open session. A session whose timeout has passed is closed first."""
        found = await self._sessions.find(session_id, owner)
        if found is None:
            return None
        session = msgspec.convert(found, Session)
        if session.timeout_s is not None and time.time() > session.used_at + session.timeout_s:
            await self._delete(session_id, owner)
            return None
        return session

    async def _delete_later(self, session_id: str, rid: str, owner: str) -> None:
        """Delete the requests that continue this one, and those that continue them."""
        parts, _ = await self._turns.read_parts(session_id, owner)
        children: dict[str, list[str]] = {}
        for part in parts:
            turn = _decode(part)
            children.setdefault(turn.continues, []).append(turn.rid)
        # A request with the ID of an earlier one may have replaced what it continues.
        later = children.pop(rid, [])
        while later:
            child = later.pop()
            later += children.pop(child, [])
            if child != rid:
                await self._turns.delete(_key(session_id, child), owner)

    async def _delete(self, session_id: str, owner: str) -> None:
        await self._sessions.delete(session_id, owner)
        await self._turns.delete_children(session_id, owner)


def _key(session_id: str, rid: str) -> str:
    # The ID of a request has no line break, so that different pairs have different keys.
    return f"{session_id}\n{rid}"


def _bytes_of(token_ids: npt.ArrayLike) -> bytes:
    return np.asarray(token_ids, "<i4").tobytes()


def _decode(data: bytes) -> FinishedTurn:
    return msgspec.msgpack.decode(data, type=FinishedTurn)
