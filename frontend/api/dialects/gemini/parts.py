"""Translate the contents of the Gemini API to chat messages."""

from __future__ import annotations

import base64
import binascii
import json
import re
from typing import Any, Final

from ....http.errors import bad_request, expect, wrong
from ...logprobs import Json

_SNAKE: Final = re.compile("[A-Z]")

_KINDS: Final = {"image": "image_url", "audio": "audio_url", "video": "video_url"}


def get(fields: Json, name: str) -> Any:
    """Return the value of a field by its name in camel case or snake case; None if it is absent."""
    found = fields.get(name)
    if found is None:
        found = fields.get(_SNAKE.sub(lambda match: f"_{match[0].lower()}", name))
    return found


class ContentReader:
    """Collects the messages of a conversation. Results of functions become messages of tools."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        # The calls without a result so far: their names and identifiers.
        self._open: list[tuple[str, str]] = []
        self._num_calls = 0

    def add_system(self, content: Any, where: str) -> None:
        """Add the instructions. Raise APIError 400 if they are not texts."""
        parts = [self._media(part, place) for part, place in _parts_of(content, where)]
        self.messages.append({"role": "system", "content": parts})

    def add_contents(self, contents: Any, where: str) -> None:
        """Add the turns of a conversation, or one turn, or a text. Raise APIError 400 if a part is invalid."""
        if not isinstance(contents, list):
            contents = [contents]
        for i, content in enumerate(contents):
            self._add_content(content, f"{where}[{i}]")

    def _add_content(self, content: Any, where: str) -> None:
        role = content.get("role") if isinstance(content, dict) else None
        if role not in (None, "", "user", "model", "function"):
            raise wrong(f"{where}.role", '"user" or "model"', role)
        if role == "model":
            self._add_answer(content, where)
            return
        parts: list[Json] = []
        for part, place in _parts_of(content, where):
            result = get(part, "functionResponse")
            if result is None:
                parts.append(self._media(part, place))
            else:
                self._add_result(result, f"{place}.functionResponse")
        if parts:
            self.messages.append({"role": "user", "content": parts})

    def _add_answer(self, content: Json, where: str) -> None:
        texts: list[Json] = []
        thoughts: list[str] = []
        calls: list[Json] = []
        for part, place in _parts_of(content, where):
            call, text = get(part, "functionCall"), part.get("text")
            if call is not None:
                calls.append(self._call(call, f"{place}.functionCall"))
            elif part.get("thought"):
                thoughts += [text] if isinstance(text, str) else []
            else:
                texts.append(self._media(part, place))
        message: Json = {"role": "assistant", "content": texts or None}
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self.messages.append(message)

    def _call(self, call: Any, where: str) -> Json:
        expect(call, dict, where, "an object")
        name = expect(call.get("name"), str, f"{where}.name", "a string")
        arguments = expect(call.get("args") or {}, dict, f"{where}.args", "an object")
        identifier = call.get("id")
        if not isinstance(identifier, str) or not identifier:
            identifier = f"call_{self._num_calls}"
        self._num_calls += 1
        self._open.append((name, identifier))
        function = {"name": name, "arguments": arguments}
        return {"id": identifier, "type": "function", "function": function}

    def _add_result(self, result: Any, where: str) -> None:
        expect(result, dict, where, "an object")
        name = expect(result.get("name"), str, f"{where}.name", "a string")
        found = result.get("id")
        if not isinstance(found, str) or not found:
            # Older models have no identifiers: results are in the order of the calls.
            open_calls = [call for call in self._open if call[0] == name]
            found = open_calls[0][1] if open_calls else name
        self._open = [call for call in self._open if call[1] != found]
        response = result.get("response")
        text = response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)
        content: Any = text
        if (parts := result.get("parts")) is not None:
            media = [self._media(part, at) for part, at in _parts_of({"parts": parts}, where)]
            content = [{"type": "text", "text": text}, *media]
        message = {"role": "tool", "tool_call_id": found, "name": name, "content": content}
        self.messages.append(message)

    def _media(self, part: Json, where: str) -> Json:
        """Return the content part for a text, an image, audio, a video or a file."""
        if isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        if (code := get(part, "executableCode")) is not None:
            return {"type": "text", "text": str(expect(code, dict, where, "an object").get("code"))}
        if (output := get(part, "codeExecutionResult")) is not None:
            shown = expect(output, dict, where, "an object").get("output")
            return {"type": "text", "text": str(shown)}
        if (blob := get(part, "inlineData")) is not None:
            return _inline(blob, f"{where}.inlineData")
        if (file := get(part, "fileData")) is not None:
            place = f"{where}.fileData"
            kind = _media_type(expect(file, dict, place, "an object"), place)
            url = expect(get(file, "fileUri"), str, f"{place}.fileUri", "a URL")
            return _at_url(url, kind, f"{place}.mimeType")
        expected = "text, inlineData, fileData, functionCall or functionResponse"
        raise bad_request(where, f"must have {expected}")


def text_of(content: Any, where: str) -> str:
    """Return the joined texts of a content. Raise APIError 400 if it has parts other than texts."""
    texts = []
    for part, place in _parts_of(content, where):
        texts.append(expect(part.get("text"), str, f"{place}.text", "a string"))
    return "\n".join(texts)


def _parts_of(content: Any, where: str) -> list[tuple[Json, str]]:
    """Return the parts of a content, and their places. A text is a content with one part."""
    if isinstance(content, str):
        return [({"text": content}, where)]
    parts = expect(content, dict, where, "an object").get("parts")
    if isinstance(parts, dict):
        parts = [parts]
    expect(parts, list, f"{where}.parts", "an array of parts")
    found = []
    for i, part in enumerate(parts or ()):
        place = f"{where}.parts[{i}]"
        part = {"text": part} if isinstance(part, str) else part
        found.append((expect(part, dict, place, "an object"), place))
    return found


def _media_type(fields: Json, where: str) -> str:
    found: str = expect(get(fields, "mimeType"), str, f"{where}.mimeType", "a string")
    return found


def _inline(blob: Any, where: str) -> Json:
    media_type = _media_type(expect(blob, dict, where, "an object"), where)
    data = expect(blob.get("data"), str, f"{where}.data", "a string in base64")
    # Google's clients write base64 for URLs.
    data = data.replace("-", "+").replace("_", "/")
    if media_type == "application/pdf":
        return {"type": "file", "file": {"file_data": f"data:{media_type};base64,{data}"}}
    if media_type.startswith("text/"):
        try:
            return {"type": "text", "text": base64.b64decode(data).decode()}
        except (binascii.Error, ValueError):
            raise bad_request(f"{where}.data", "must be UTF-8 text in base64") from None
    return _at_url(f"data:{media_type};base64,{data}", media_type, f"{where}.mimeType")


def _at_url(url: str, media_type: str, where: str) -> Json:
    kind = _KINDS.get(media_type.partition("/")[0])
    if kind is None:
        raise wrong(where, "an image, audio or video type, a text or application/pdf", media_type)
    return {"type": kind, kind: {"url": url}}
