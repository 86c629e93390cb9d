"""Translate requests of Google's Interactions API to requests of the Responses API.

The shapes are those of `google-genai` 3.6.1 (`google.genai._gaos.types.interactions`).
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from typing import Any, Final

from ....http.errors import bad_request, expect, expect_text, renamer, wrong
from ...logprobs import Json
from ...responses.items import ENCODED_TEXT, encode_text
from ...schema.interactions import InteractionConfig, InteractionRequest
from ...schema.responses import ResponsesRequest

_CONFIG: Final = "generation_config"
_JSON_TYPE: Final = "application/json"

_MEDIA: Final = ("image", "audio", "video", "document")
_CONTENTS: Final = ("text", *_MEDIA)
_STEPS: Final = ("user_input", "model_output", "thought", "function_call", "function_result")

_ROLES: Final = {"user_input": "user", "model_output": "assistant"}
"""Step with contents -> role of the message."""

_CHOICES: Final = {"auto": "auto", "validated": "auto", "any": "required", "none": "none"}
"""Tool choice here -> in the Responses API."""

_LEVELS: Final = ("minimal", "low", "medium", "high", "xhigh")

_REFUSED: Final = ("image_config", "speech_config", "transcription_config", "video_config")

_rename: Final = renamer(
    {
        "max_output_tokens": f"{_CONFIG}.max_output_tokens",
        "seed": f"{_CONFIG}.seed",
        "stop": f"{_CONFIG}.stop_sequences",
        "temperature": f"{_CONFIG}.temperature",
        "top_p": f"{_CONFIG}.top_p",
        "reasoning.effort": f"{_CONFIG}.thinking_level",
        "tool_choice": f"{_CONFIG}.tool_choice",
        "text.format": "response_format",
        "instructions": "system_instruction",
        "metadata": "labels",
        "previous_response_id": "previous_interaction_id",
        "starting_after": "last_event_id",
    }
)
_ITEM: Final = re.compile(r"input\[(\d+)\]")


def sent_name(body: InteractionRequest | None, name: str) -> str:
    """Return the name of a field here for its name in the Responses API, for error messages."""
    if body is None or _ITEM.match(name) is None:
        return _rename(name)
    if not _has_steps(body.input):
        # All contents are in one message.
        name = name.removeprefix("input[0]")
        place = f"input{name.removeprefix('.content')}"
        return place if isinstance(body.input, list) else place.replace("[0]", "", 1)
    return name.replace(".output", ".result").replace(".image_url", "")


def _has_steps(given: object) -> bool:
    if not isinstance(given, list) or not given:
        return False
    return given[0].get("type") not in _CONTENTS


def translate(body: InteractionRequest) -> ResponsesRequest:
    """Return the body translated to a request of the Responses API.

    Raises:
        APIError: A field is invalid or not supported; it is named as in the body (400).
    """
    config = body.generation_config or InteractionConfig()
    for name in _REFUSED:
        if (value := getattr(config, name)) is not None:
            raise wrong(f"{_CONFIG}.{name}", "left out, because this server writes text", value)
    for i, modality in enumerate(body.response_modalities or ()):
        if modality.lower() != "text":
            raise wrong(f"response_modalities[{i}]", '"text"', modality)
    if config.thinking_summaries not in (None, "auto", "none"):
        raise wrong(f"{_CONFIG}.thinking_summaries", '"auto" or "none"', config.thinking_summaries)
    reasoning: Json = {}
    if config.thinking_level is not None:
        if config.thinking_level not in _LEVELS:
            expected = f"one of {', '.join(_LEVELS)}"
            raise wrong(f"{_CONFIG}.thinking_level", expected, config.thinking_level)
        reasoning["effort"] = config.thinking_level
    if config.thinking_summaries == "auto":
        reasoning["summary"] = "auto"
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    form = _format(body)
    return ResponsesRequest(
        model=body.model,
        input=_items(body.input),
        instructions=body.system_instruction,
        previous_response_id=body.previous_interaction_id,
        tools=tools or None,
        tool_choice=_tool_choice(config.tool_choice),
        reasoning=reasoning or None,
        text=None if form is None else {"format": form},
        background=body.background,
        store=body.store,
        stream=body.stream,
        metadata=body.labels,
        max_output_tokens=config.max_output_tokens,
        seed=config.seed,
        stop=config.stop_sequences,
        temperature=config.temperature,
        top_p=config.top_p,
    )


def _items(given: str | Json | list[Json] | None) -> str | list[Json] | None:
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, dict):
        return [{"role": "user", "content": [_part(given, "input")]}]
    if given and not _has_steps(given):
        parts = [_part(part, f"input[{i}]") for i, part in enumerate(given)]
        return [{"role": "user", "content": parts}]
    return [_item(step, f"input[{i}]") for i, step in enumerate(given)]


def _item(step: Json, where: str) -> Json:
    """Return the item for a step."""
    match kind := step.get("type"):
        case "user_input" | "model_output":
            content = step.get("content")
            parts = [] if content is None else expect(content, list, f"{where}.content", "an array")
            found = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(parts)]
            return {"type": "message", "role": _ROLES[kind], "content": found}
        case "thought":
            return _reasoning(step, where)
        case "function_call":
            arguments = expect(step.get("arguments"), dict, f"{where}.arguments", "an object")
            return {
                "type": "function_call",
                "call_id": expect_text(step, "id", where),
                "name": expect_text(step, "name", where),
                "arguments": json.dumps(arguments, ensure_ascii=False),
            }
        case "function_result":
            item: Json = {"type": "function_call_output", "output": _result(step, where)}
            item["call_id"] = expect_text(step, "call_id", where)
            if step.get("name") is not None:
                item["name"] = expect_text(step, "name", where)
            return item
    expected = f"one of {', '.join((*_STEPS, *_CONTENTS))}, because this server runs no tools"
    raise wrong(f"{where}.type", expected, kind)


def _result(step: Json, where: str) -> str | list[Json]:
    """Return the result of a function. That of a call that failed begins with "Error:"."""
    result = step.get("result")
    if result is None:
        raise bad_request(f"{where}.result", "is required")
    if isinstance(result, list):
        parts = [_part(part, f"{where}.result[{i}]") for i, part in enumerate(result)]
        return [{"type": "input_text", "text": "Error:"}, *parts] if step.get("is_error") else parts
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    return f"Error: {text}" if step.get("is_error") else text


def sign(text: str) -> str:
    """Return the signature of a thought, which holds its text, so that a client without storage can send it back."""
    return base64.b64encode(encode_text(text).encode()).decode()


def _reasoning(step: Json, where: str) -> Json:
    """Return the item for a thought. The signature of another server has no effect."""
    parts = step.get("summary")
    summary = []
    for i, part in enumerate(
        [] if parts is None else expect(parts, list, f"{where}.summary", "an array")
    ):
        place = f"{where}.summary[{i}]"
        text = expect_text(expect(part, dict, place, "an object"), "text", place)
        summary.append({"type": "summary_text", "text": text})
    item: Json = {"type": "reasoning", "summary": summary}
    signature = step.get("signature")
    if signature is not None:
        try:
            encoded = base64.b64decode(
                expect_text(step, "signature", where), validate=True
            ).decode()
        except (binascii.Error, ValueError):
            encoded = ""
        if encoded.startswith(ENCODED_TEXT):
            item["encrypted_content"] = encoded
    return item


def _part(part: Any, where: str) -> Json:
    """Return the content part for a content."""
    kind = expect(part, dict, where, "an object").get("type")
    if kind == "text":
        return {"type": "input_text", "text": expect_text(part, "text", where)}
    if kind not in _MEDIA:
        raise wrong(f"{where}.type", f"one of {', '.join(_CONTENTS)}", kind)
    data, uri = part.get("data"), part.get("uri")
    if data is None and uri is None:
        raise bad_request(where, "must have data in base64 or a uri")
    if data is None and kind in ("audio", "document"):
        raise wrong(f"{where}.uri", "left out for data, the content in base64", uri)
    if data is None:
        url = expect_text(part, "uri", where)
    else:
        media_type = expect_text(part, "mime_type", where)
        # Google's clients may write base64 for URLs.
        data = expect_text(part, "data", where).replace("-", "+").replace("_", "/")
        if kind == "audio":
            form = media_type.rpartition("/")[2]
            audio = {"data": data, "format": "mp3" if form == "mpeg" else form}
            return {"type": "input_audio", "input_audio": audio}
        url = f"data:{media_type};base64,{data}"
    match kind:
        case "image":
            return {"type": "input_image", "image_url": url}
        case "video":
            return {"type": "video_url", "video_url": {"url": url}}
    return {"type": "input_file", "file_data": url}


def _tool(tool: Json, where: str) -> Json:
    kind = tool.get("type")
    if kind != "function":
        raise wrong(f"{where}.type", '"function", because this server runs no tools', kind)
    name = expect_text(tool, "name", where)
    parameters = tool.get("parameters")
    shown = {"type": "object", "properties": {}} if parameters is None else parameters
    found: Json = {"type": kind, "name": name, "parameters": shown}
    if tool.get("description") is not None:
        found["description"] = expect_text(tool, "description", where)
    return found


def _tool_choice(choice: str | Json | None) -> str | Json | None:
    where = f"{_CONFIG}.tool_choice"
    if choice is None:
        return None
    if isinstance(choice, str):
        return _mode(choice, where)
    where += ".allowed_tools"
    allowed = expect(choice.get("allowed_tools"), dict, where, "an object")
    names = expect(allowed.get("tools"), list, f"{where}.tools", "an array of names")
    mode = allowed.get("mode")
    tools = [
        {"type": "function", "name": expect(name, str, f"{where}.tools[{i}]", "a string")}
        for i, name in enumerate(names)
    ]
    mode = _mode("auto" if mode is None else mode, f"{where}.mode")
    return "none" if mode == "none" else {"type": "allowed_tools", "mode": mode, "tools": tools}


def _mode(choice: Any, where: str) -> str:
    if not isinstance(choice, str) or choice.lower() not in _CHOICES:
        raise wrong(where, '"auto", "any", "none" or "validated"', choice)
    return _CHOICES[choice.lower()]


def _format(body: InteractionRequest) -> Json | None:
    """Return the format of the text; None for any text."""
    where, form = "response_format", body.response_format
    if isinstance(form, list):
        if len(form) > 1:
            raise wrong("response_format", "one format, because this server writes text", form)
        where, form = "response_format[0]", form[0] if form else None
    media_type, place, schema = body.response_mime_type, "response_mime_type", None
    if form is not None:
        kind = form.get("type")
        if kind in ("audio", "image", "video"):
            raise wrong(f"{where}.type", '"text", because this server writes text', kind)
        if kind == "text":
            schema = form.get("schema")
            media_type, place = form.get("mime_type") or media_type, f"{where}.mime_type"
        else:
            schema = form
    if media_type not in (None, "text/plain", _JSON_TYPE):
        raise wrong(place, f'"text/plain" or "{_JSON_TYPE}"', media_type)
    if schema is not None:
        if media_type == "text/plain":
            raise wrong(place, f'"{_JSON_TYPE}" with a schema', media_type)
        expect(schema, dict, f"{where}.schema", "an object")
        return {"type": "json_schema", "name": "output", "schema": schema}
    return {"type": "json_object"} if media_type == _JSON_TYPE else None
