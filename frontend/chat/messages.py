"""Convert clients' messages to the format that chat templates read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from ...protocol.errors import ParameterError
from ..http.shown_values import echo

Message = Mapping[str, Any]

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_API_FIELDS: Final = (
    "type text refusal cache_control prompt_cache_breakpoint annotations citations logprobs "
    "image image_url image_pil image_embeds input_image video video_url input_video "
    "audio audio_url input_audio audio_embeds file file_id file_url file_data filename "
    "url data format detail uuid fps sample_fps num_frames nframes min_frames max_frames "
    "min_pixels max_pixels total_pixels resized_height resized_width video_start video_end"
)
"""The fields of content parts that templates do not get: those that have a meaning in an API."""
_PART_FIELDS: Final = frozenset(_API_FIELDS.split())
_MEDIA: Final = {
    kind: word
    for word, kinds in {
        "image": ("image", "image_url", "input_image"),
        "video": ("video", "video_url", "input_video"),
        "audio clip": ("audio", "audio_url", "input_audio"),
    }.items()
    for kind in kinds
}
"""Type of a content part with media -> its name in prompts."""
_REASONING = ("reasoning_content", "reasoning", "thinking")

IMAGE_PART: Final = {"type": "image"}
AUDIO_PART: Final = {"type": "audio"}
"""The content parts that replace an image and an audio clip. They are recognized by object identity."""

VIDEO_PART: Final = {"type": "video"}
"""The content part that replaces a video. It is recognized by object identity."""


class TemplatePart(dict[str, Any]):
    """A content part of the server's own, of a type that the chat template of the model knows."""


MEDIA_MARK: Final = "\ufdd2"
AUDIO_MARK: Final = "\ufdd3"
"""Unicode noncharacters that stand for an image or a video, and for an audio clip, in templates that read only text."""

CUSTOM_INPUT: Final = "input"
"""The parameter name of the function that represents a custom tool."""


class TemplateTraits(msgspec.Struct, frozen=True):
    """The features that a chat template supports. A template that supports neither form of content gets strings."""

    reads_strings: bool
    reads_parts: bool
    reads_audio: bool
    """True if prompts show where an audio clip is among the parts of a message."""
    reads_null: bool
    """True if the content of a message with only tool calls may be null."""
    knows_developer: bool
    """True if the template has a developer role; otherwise the system role replaces it."""


def normalize_messages(messages: Sequence[Message], traits: TemplateTraits) -> list[dict[str, Any]]:
    """Return a copy of `messages` in the format that the template reads.

    Raises:
        ParameterError: A field is invalid; the error names it.
    """
    if not messages:
        raise ParameterError("messages", "must not be empty")
    normalized = []
    follows_result = False
    for i, message in enumerate(messages):
        is_result = message.get("role") in ("tool", "function")
        # Some agents send the media of a result in a message of the user behind it.
        if is_result or follows_result:
            message = _without_media(message)
        follows_result = is_result
        normalized.append(_normalize(message, f"messages[{i}]", traits))
    if any("function_call" in message for message in normalized):
        _replace_function_calls(normalized)
    return normalized


def _normalize(message: Message, where: str, traits: TemplateTraits) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ParameterError(f"{where}.role", f'must be a string such as "user", got {echo(role)}')
    normalized = {key: value for key, value in message.items() if value is not None}
    if role == "function":
        normalized["role"] = "tool"
    if role == "developer" and not traits.knows_developer:
        normalized["role"] = "system"
    tool_calls = message.get("tool_calls")
    if tool_calls is not None and not isinstance(tool_calls, list):
        raise ParameterError(f"{where}.tool_calls", f"must be an array, got {echo(tool_calls)}")
    if tool_calls:
        normalized["tool_calls"] = [
            _normalize_tool_call(call, f"{where}.tool_calls[{i}]")
            for i, call in enumerate(tool_calls)
        ]
    else:
        normalized.pop("tool_calls", None)
    function_call = message.get("function_call")
    if function_call is not None:
        if not isinstance(function_call, Mapping):
            raise ParameterError(
                f"{where}.function_call", f"must be an object, got {echo(function_call)}"
            )
        normalized["function_call"] = _normalize_function(function_call, f"{where}.function_call")
    calls_tools = bool(tool_calls or function_call)
    reasoning = next((message[name] for name in _REASONING if message.get(name)), None)
    if reasoning is not None:
        normalized |= {"reasoning_content": reasoning, "thinking": reasoning}
    content = message.get("content")
    if content is None:
        normalized["content"] = None if calls_tools and traits.reads_null else ""
    else:
        normalized["content"] = _normalize_content(content, f"{where}.content", traits)
    return normalized


def _replace_function_calls(messages: list[dict[str, Any]]) -> None:
    """Convert calls and results of the older `functions` interface to tool calls and tool results.

    The old interface has no call IDs. So IDs of nine letters and digits are created, which every known template
    accepts.
    """
    call_id = None
    for i, message in enumerate(messages):
        function_call = message.pop("function_call", None)
        if function_call is not None and "tool_calls" not in message:
            call_id = f"call{i % 100_000:05}"
            call = {"id": call_id, "type": "function", "function": function_call}
            message["tool_calls"] = [call]
        elif message["role"] == "tool" and call_id is not None:
            message.setdefault("tool_call_id", call_id)


def text_of_content(content: Any) -> str:
    """Return the text of a message's content, which has been validated."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(_text_of(p, "") for p in content)


def _normalize_content(content: Any, where: str, traits: TemplateTraits) -> Any:
    if isinstance(content, str):
        if traits.reads_strings:
            return content
        return [{"type": "text", "text": content}]
    if not isinstance(content, Sequence):
        raise ParameterError(where, f"must be a string or an array of parts, got {echo(content)}")
    parts = [
        dict(part)
        if part is IMAGE_PART
        or part is VIDEO_PART
        or part is AUDIO_PART
        or isinstance(part, TemplatePart)
        else {"type": "text", "text": _text_of(part, f"{where}[{i}]"), **fields_for_template(part)}
        for i, part in enumerate(content)
    ]
    if not traits.reads_audio:
        mark = {"type": "text", "text": AUDIO_MARK}
        parts = [mark if part["type"] == "audio" else part for part in parts]
    return parts if traits.reads_parts else "\n".join(map(_plain_text, parts))


def _without_media(message: Message) -> Message:
    """Return a message with notes in place of media that the model cannot read.

    An agent cannot take its tool's result back, so an error would end its conversation.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_note_or_part(part) for part in content]}


def _note_or_part(part: Any) -> Any:
    if not isinstance(part, Mapping) or isinstance(part, TemplatePart):
        return part
    if part is IMAGE_PART or part is VIDEO_PART or part is AUDIO_PART:
        return part
    kind = part.get("type")
    word = _MEDIA.get(kind) if isinstance(kind, str) else None
    return (
        part if word is None else {"type": "text", "text": f"[{word}: not readable by this model]"}
    )


def fields_for_template(part: Any) -> dict[str, Any]:
    """Return the fields of a content part that only the template reads, such as TranslateGemma's language codes."""
    if not isinstance(part, Mapping):
        return {}
    return {
        key: value
        for key, value in part.items()
        if value is not None and isinstance(key, str) and key not in _PART_FIELDS
    }


def _plain_text(part: Message) -> str:
    """Return the text of a part, or the mark of an image, a video or an audio clip."""
    text: str = part.get("text", AUDIO_MARK if part["type"] == "audio" else MEDIA_MARK)
    return text


def _text_of(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise ParameterError(
            f"{where}.type", f'must be "text", because this model reads only text; got {echo(kind)}'
        )
    text = part.get(field)
    if not isinstance(text, str):
        raise ParameterError(f"{where}.{field}", f"must be a string, got {echo(text)}")
    return text


def _normalize_tool_call(call: Any, where: str) -> dict[str, Any]:
    """Return the call as a function call whose arguments are an object, as templates expect.

    The input of a custom tool becomes the argument of the function that represents the tool.
    """
    custom = call.get("custom") if isinstance(call, Mapping) else None
    if isinstance(custom, Mapping):
        name, text = custom.get("name"), custom.get("input")
        if not isinstance(name, str):
            raise ParameterError(f"{where}.custom.name", f"must be a string, got {echo(name)}")
        if not isinstance(text, str):
            raise ParameterError(f"{where}.custom.input", f"must be a string, got {echo(text)}")
        others = {key: value for key, value in call.items() if key != "custom"}
        stand_in = {"name": name, "arguments": {CUSTOM_INPUT: text}}
        return {**others, "type": "function", "function": stand_in}
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ParameterError(f"{where}.function.name", f"must be a string, got {echo(function)}")
    return {**call, "function": _normalize_function(function, f"{where}.function")}


def _normalize_function(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(name := function.get("name"), str):
        raise ParameterError(f"{where}.name", f"must be a string, got {echo(name)}")
    arguments = function.get("arguments")
    if not isinstance(arguments, Mapping):
        arguments = _decode_arguments(arguments, f"{where}.arguments")
    return {**function, "arguments": arguments}


def _decode_arguments(arguments: Any, where: str) -> dict[str, Any]:
    """Return the object that a call's JSON arguments encode, or an empty object if they are invalid.

    A call that was cut off at `max_tokens` is incomplete. Rejecting it would end the conversation, because clients send
    the same history with every request.
    """
    try:
        decoded = json.loads(arguments) if isinstance(arguments, str) else None
    except ValueError:
        return {}
    except RecursionError as error:
        raise ParameterError(where, "is nested too deeply; use fewer levels") from error
    return decoded if isinstance(decoded, dict) else {}
