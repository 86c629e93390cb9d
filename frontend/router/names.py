"""Find the model that a request names, in its path, its query or its body."""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec
from starlette._utils import get_route_path
from starlette.types import Scope

from ..api.dialects.azure import find_deployment
from ..api.dialects.ollama_request import UNLOAD, reason_without_prompt

_IN_PATH: Final = re.compile(
    r"/v1(?:beta)?/models/(.+):\w+|/v1/models/(.+)|/models/(?!load|unload)(.+)"
)
"""Google's methods, and the route that describes a model."""

_IN_FORM: Final = re.compile(
    rb'\r\nContent-Disposition: *+form-data; *+name="?model"?\r\n(?:[^\r\n]++\r\n){0,4}+\r\n([^\r\n]*)\r\n',
    re.I,
)
"""The field `model` of a form. Its further headers are few, and nothing is tried twice, so the time is linear."""


class _Body(msgspec.Struct):
    model: Any = None
    name: Any = None


class _Prompt(msgspec.Struct):
    """The fields of Ollama's API that make a request unload its model."""

    prompt: Any = None
    messages: Any = None
    images: Any = None
    keep_alive: float | str | None = None


_decode = msgspec.json.Decoder(_Body).decode
_decode_prompt = msgspec.json.Decoder(_Prompt).decode


def find_name(scope: Scope, body: bytes) -> str:
    """Return the name of the model; "" if the request names none. Ollama's clients also call it `name`."""
    match = _IN_PATH.fullmatch(get_route_path(scope))
    if match is not None:
        return str(next(filter(None, match.groups())))
    if name := find_deployment(scope):
        return name
    query: dict[str, list[str]] = parse_qs(scope["query_string"].decode("latin-1"))
    for name in ("model", "deployment"):
        if name in query:
            return query[name][0]
    kind = dict(scope["headers"]).get(b"content-type", b"").lower()
    if kind.startswith(b"multipart/"):
        found = _IN_FORM.search(b"\r\n" + body)
        return "" if found is None else str(found[1], "utf-8", "replace")
    try:
        decoded = _decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        # The server of the default model answers with the error.
        return ""
    return next((each for each in (decoded.model, decoded.name) if isinstance(each, str)), "")


def is_unload(scope: Scope, body: bytes) -> bool:
    """Return whether a request of Ollama's API has no prompt and only unloads its model."""
    is_ollama = get_route_path(scope) in ("/api/chat", "/api/generate")
    if not is_ollama or b'"keep_alive"' not in body:
        return False
    try:
        decoded = _decode_prompt(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    has_prompt = bool(decoded.prompt or decoded.messages or decoded.images)
    return not has_prompt and reason_without_prompt(decoded.keep_alive) == UNLOAD
