"""Check whether the answer to an attack is one clear answer."""

from __future__ import annotations

import re
from typing import Final

from support.hostile.client import Answer

MAX_MESSAGE: Final = 1200
MAX_ERROR_BYTES: Final = 8192

# Values of the caller are quoted, and truncated ones end with their length.
_QUOTED = re.compile(r'[^ ]*… \(\d+ characters\)|"(?:[^"\\]|\\.)*"|\'[^\']*\'|`[^`]*`|“[^”]*”')
_PYTHON = re.compile(
    r"\b(None|NoneType|True|False|str|int|float|bool|list|dict|tuple|Traceback|[A-Z]\w+Error|"
    r"object at 0x\w+|<class)\b"
)
_LONG_ECHO = re.compile(r"(.)\1{250}|\d{250}")
_ERROR_FIELDS = {"message", "type", "param", "code"}
_ERROR_FIELDS_OF_MESSAGES = {"message", "type"}
"""The fields of an error in the Messages API, beside `details`. The type of its body is `error`."""
_OPTIONAL = {"retry_after", "n_prompt_tokens", "n_ctx"}

_CAUSES = (
    "maximum context length",
    "prompt is too long",
    "has no classification head",
    "can fill in the middle",
    "is not a speech model",
    "neither a directory nor ORG/NAME",
    "The LoRA adapter",
)
"""Causes that a refusal may name instead of a field.

Several fields together make the prompt, and a model that lacks what a route needs refuses every request of the route.
The routes of adapters get names of none.
"""

_METHOD_OF_GEMINI = re.compile(":[A-Za-z]+$")

_FINE = range(200, 300)
# A health route reports a process that got no processor for a second.
_NOT_READY = b'{"state":"not ready"'
# 503 means full or starting; 501 means an unsupported transfer coding.
_REFUSALS = {400, 401, 403, 404, 405, 408, 409, 411, 413, 415, 421, 422, 426, 429, 431, 501, 503}


def find_fault(answer: Answer, field: str = "", *, path: str = "", may_succeed: bool = True) -> str:
    """Return what is wrong with the answer of the route `path` to an attack on `field`; "" if it is clear.

    Unless `may_succeed`, the attack must be refused.
    """
    if not answer.status:
        return f"no answer: {answer.error}"
    if answer.status in _FINE:
        if not may_succeed:
            return f"status {answer.status} for what must be refused"
        return _find_fault_of_success(answer)
    if answer.status not in _REFUSALS:
        return f"status {answer.status}: {answer.body[:300]!r}"
    if answer.status == 503 and answer.body.startswith(_NOT_READY):
        return ""
    return _find_fault_of_error(answer, field, path)


def _find_fault_of_success(answer: Answer) -> str:
    if not answer.headers.get("content-type", "").startswith("application/json"):
        return ""
    try:
        content = answer.json
    except ValueError as error:
        return f"status {answer.status} with a body that is not JSON: {error}"
    if isinstance(content, dict) and content.get("error"):
        return f"status {answer.status} with an error: {answer.body[:300]!r}"
    return ""


def _find_fault_of_error(answer: Answer, field: str, path: str) -> str:
    start = answer.body[:500]
    try:
        body = answer.json
        if path.endswith("/v2/chat"):
            # An error of Cohere's route is its message.
            body = {"error": {"message": body["message"], "type": "", "param": None, "code": None}}
        error, fields = body["error"], _ERROR_FIELDS
        if "error_type" in body:
            # An error of TGI's routes is its message and its type.
            error = {"message": error, "type": body["error_type"], "param": None, "code": None}
        if path.startswith("/api/") or path == "/inference":
            # An error of Ollama's and whisper.cpp's routes is its message.
            if not isinstance(error, str) or len(body) > 1:
                return f"an error object of another shape: {start!r}"
            error = {"message": error, "type": "", "param": None, "code": None}
        elif "/interactions" in path:
            if set(error) != {"code", "message"}:
                return f"an error object of another shape: {start!r}"
            error = {"message": error["message"], "type": error["code"], "param": None}
            error["code"] = None
        elif _METHOD_OF_GEMINI.search(path):
            if set(error) != {"code", "message", "status"}:
                return f"an error object of another shape: {start!r}"
            error = {"message": error["message"], "type": error["status"], "param": None}
            error["code"] = None
        elif path.startswith("/v1/messages"):
            fields = _ERROR_FIELDS_OF_MESSAGES
            error.pop("details", None)
            if body["type"] != "error":
                return f"an error object of another shape: {start!r}"
        message, param = error["message"], error.get("param")
    except (ValueError, TypeError, KeyError) as problem:
        return f"status {answer.status} without an error object ({problem!r}): {start!r}"
    if set(error) - _OPTIONAL != fields or not isinstance(message, str):
        return f"an error object of another shape: {start!r}"
    if not message.strip() or not isinstance(error["type"], str):
        return f"an error without a message or type: {start!r}"
    if len(message) > MAX_MESSAGE or len(answer.body) > MAX_ERROR_BYTES:
        return f"an error of {len(answer.body)} bytes: {start!r}"
    if _LONG_ECHO.search(message) or _LONG_ECHO.search(param or ""):
        return f"a long value is repeated: {start!r}"
    words = _PYTHON.search(_QUOTED.sub('""', message))
    if words:
        return f"Python's word {words[0]!r} in {message!r}"
    if field and not _names(field, message, param) and answer.status in (400, 422):
        return f"the message does not name {field}: {message!r}, param {param!r}"
    return ""


def _names(field: str, message: str, param: str | None) -> bool:
    """Return whether the error names the field, the body as a whole, or the whole prompt."""
    names = {field, field.partition(".")[0].partition("[")[0], "body", *_CAUSES}
    return any(name in message or name in (param or "") for name in names)
