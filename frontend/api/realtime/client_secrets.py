"""`POST /v1/realtime/client_secrets`: secrets with which web pages open transcription sessions."""

from __future__ import annotations

import time
import uuid
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...http.access import digest_of, key_of
from ...http.client_secrets import read_content, write_secret
from ...http.errors import bad_request, json_response, wrong
from ..bodies.intake import Intake, RouteHandlers, reads
from ..routes.transcriptions import Transcriptions
from ..schema.realtime import ClientSecretRequest, Session
from ..serving import Serving
from .settings import Settings, make_plan

_DEFAULT_S: Final = 600
_LEAST_S: Final = 10
_MOST_S: Final = 7200

MAX_SESSION_BYTES: Final = 2048
"""Maximum size of the session in a secret, as JSON. The secret is part of a header."""


class ClientSecrets(RouteHandlers):
    """The route that creates client secrets."""

    def __init__(self, serving: Serving, intake: Intake, transcriptions: Transcriptions) -> None:
        super().__init__(serving, intake)
        self._transcriptions = transcriptions

    @reads(ClientSecretRequest)
    async def create(self, http: Request, request: ClientSecretRequest, body_size: int) -> Response:
        """Return a secret, and the session that it opens."""
        after = request.expires_after
        seconds = _DEFAULT_S
        if after is not None:
            if after.anchor not in (None, "created_at"):
                raise wrong("expires_after.anchor", '"created_at"', after.anchor)
            seconds = _DEFAULT_S if after.seconds is None else after.seconds
        if not _LEAST_S <= seconds <= _MOST_S:
            raise wrong("expires_after.seconds", f"between {_LEAST_S} and {_MOST_S}", seconds)
        session = request.session or Session()
        settings = Settings.default(self._serving.served_name).updated(session)
        if (planned := settings.request()) is not None:
            self._serving.verify_model(planned.model)
            make_plan(self._transcriptions, planned)
        content = msgspec.json.encode(session)
        if len(content) > MAX_SESSION_BYTES:
            raise bad_request(
                "session", f"must have at most {MAX_SESSION_BYTES} bytes, got {len(content)}"
            )
        expires_at = int(time.time()) + seconds
        secret = write_secret(digest_of(key_of(dict(http.headers.raw))), expires_at, content)
        described = settings.describe(f"sess_{uuid.uuid4().hex}")
        return json_response({"value": secret, "expires_at": expires_at, "session": described})


def session_of(headers: dict[bytes, bytes]) -> Session | None:
    """Return the session in the secret of a handshake; None without one."""
    content = read_content(key_of(headers))
    try:
        return msgspec.json.decode(content, type=Session) if content else None
    except msgspec.MsgspecError:
        return None
