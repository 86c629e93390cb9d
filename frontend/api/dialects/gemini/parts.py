"""Translate the contents of the Gemini API to chat messages."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from typing import Any, Final

from ....http.errors import bad_request, wrong
from ...bodies.conversion import read_part
from ...logprobs import Json
from .schema import Blob, Content, Contents, FunctionCall, FunctionResponse, Part, in_camel_case

_KINDS: Final = {"image": "image_url", "audio": "audio_url", "video": "video_url"}


class ContentReader:
    """Collects the messages of a conversation. Results of functions become messages of tools."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self.places: list[str] = []
        """The contents of which the messages were parts."""
        # The calls without a result so far: their names and identifiers.
        self._open: list[tuple[str, str]] = []
        self._num_calls = 0

    def add_system(self, content: Any, where: str) -> None:
        """Add the instructions. Raise APIError 400 if they are not texts."""
        parts = [_media(part, place) for part, place in _parts_of(_read(content, where), where)]
        self._add({"role": "system", "content": parts}, where)

    def _add(self, message: Json, where: str) -> None:
        self.messages.append(message)
        self.places.append(where)

    def add_contents(self, contents: Any) -> None:
        """Add the turns of a conversation, or one turn, or a text. Raise APIError 400 if a part is invalid."""
        given = contents if isinstance(contents, list) else [contents]
        turns = read_part(in_camel_case({"contents": given}), Contents).contents
        for i, turn in enumerate(turns):
            place = f"contents[{i}]"
            if isinstance(turn, str):
                turn = Content(parts=Part(text=turn))
            if turn.role == "model":
                self._add_answer(turn, place)
            else:
                self._add_turn(turn, place)

    def _add_turn(self, content: Content, where: str) -> None:
        parts: list[Json] = []
        for part, place in _parts_of(content, where):
            if part.function_response is None:
                parts.append(_media(part, place))
            else:
                self._add_result(part.function_response, f"{place}.functionResponse")
        if parts:
            self._add({"role": "user", "content": parts}, where)

    def _add_answer(self, content: Content, where: str) -> None:
        texts: list[Json] = []
        thoughts: list[str] = []
        calls: list[Json] = []
        for part, place in _parts_of(content, where):
            if part.function_call is not None:
                calls.append(self._call(part.function_call))
            elif part.thought:
                thoughts.append(part.text or "")
            else:
                texts.append(_media(part, place))
        message: Json = {"role": "assistant", "content": texts or None}
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self._add(message, where)

    def _call(self, call: FunctionCall) -> Json:
        identifier = call.id or f"call_{self._num_calls}"
        self._num_calls += 1
        self._open.append((call.name, identifier))
        function = {"name": call.name, "arguments": call.args or {}}
        return {"id": identifier, "type": "function", "function": function}

    def _add_result(self, result: FunctionResponse, where: str) -> None:
        found = result.id
        if not found:
            # Older models have no identifiers: results are in the order of the calls.
            found = next((call[1] for call in self._open if call[0] == result.name), result.name)
        self._open = [call for call in self._open if call[1] != found]
        text = result.response
        if not isinstance(text, str):
            text = json.dumps(text, ensure_ascii=False)
        content: Any = text
        if result.parts is not None:
            media = [_media(part, f"{where}.parts[{i}]") for i, part in enumerate(result.parts)]
            content = [{"type": "text", "text": text}, *media]
        message = {"role": "tool", "tool_call_id": found, "name": result.name, "content": content}
        self._add(message, where)


def text_of(content: Any, where: str) -> str:
    """Return the joined texts of a content. Raise APIError 400 if it has parts other than texts."""
    parts = list(_parts_of(_read(content, where), where))
    for part, place in parts:
        if part.text is None:
            raise wrong(f"{place}.text", "a string", None)
    return "\n".join(part.text or "" for part, _ in parts)


def _read(content: Any, where: str) -> Content:
    if isinstance(content, str):
        return Content(parts=Part(text=content))
    return read_part(in_camel_case(content), Content, where)


def _parts_of(content: Content, where: str) -> Iterator[tuple[Part, str]]:
    """Yield the parts of a content, and their places."""
    parts = [content.parts] if isinstance(content.parts, Part) else content.parts
    for i, part in enumerate(parts):
        yield Part(text=part) if isinstance(part, str) else part, f"{where}.parts[{i}]"


def _media(part: Part, where: str) -> Json:
    """Return the content part for a text, an image, audio, a video or a file."""
    if (code := part.executable_code) is not None:
        text = str(code.code)
    elif (result := part.code_execution_result) is not None:
        text = str(result.output)
    elif part.text is not None:
        text = part.text
    elif (blob := part.inline_data) is not None:
        return _inline(blob, f"{where}.inlineData")
    elif (file := part.file_data) is not None:
        return _at_url(file.file_uri, file.mime_type, f"{where}.fileData.mimeType")
    else:
        expected = "text, inlineData, fileData, functionCall or functionResponse"
        raise bad_request(where, f"must have {expected}")
    return {"type": "text", "text": text}


def _inline(blob: Blob, where: str) -> Json:
    # Google's clients write base64 for URLs.
    data = blob.data.replace("-", "+").replace("_", "/")
    if blob.mime_type == "application/pdf":
        return {"type": "file", "file": {"file_data": f"data:{blob.mime_type};base64,{data}"}}
    if blob.mime_type.startswith("text/"):
        try:
            return {"type": "text", "text": base64.b64decode(data).decode()}
        except (binascii.Error, ValueError):
            raise bad_request(f"{where}.data", "must be UTF-8 text in base64") from None
    return _at_url(f"data:{blob.mime_type};base64,{data}", blob.mime_type, f"{where}.mimeType")


def _at_url(url: str, media_type: str, where: str) -> Json:
    kind = _KINDS.get(media_type.partition("/")[0])
    if kind is None:
        raise wrong(where, "an image, audio or video type, a text or application/pdf", media_type)
    return {"type": kind, kind: {"url": url}}
