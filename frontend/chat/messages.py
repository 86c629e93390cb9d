"""Messages as clients send them, made into what a chat template reads."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...protocol.errors import ParameterError

Message = Mapping[str, Any]

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a template can read; where it reads neither form of content, it gets strings."""

    reads_strings: bool
    reads_parts: bool
    reads_null: bool
    """Whether the content of a message that only calls tools may be null."""
    knows_developer: bool
    """Whether the template has a developer role, or the system role stands in for it."""


def normalize_messages(messages: Sequence[Message], traits: TemplateTraits) -> list[dict[str, Any]]:
    """A copy of `messages` for the template. Raises ParameterError naming the field at fault."""
    if not messages:
        raise ParameterError("messages", "must not be empty")
    return [_normalize(m, f"messages[{i}]", traits) for i, m in enumerate(messages)]


def _normalize(message: Message, where: str, traits: TemplateTraits) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ParameterError(f"{where}.role", f"must be a string such as 'user', got {role!r}")
    normalized = {key: value for key, value in message.items() if value is not None}
    if role == "developer" and not traits.knows_developer:
        normalized["role"] = "system"
    tool_calls = message.get("tool_calls")
    if tool_calls is not None and not isinstance(tool_calls, list):
        raise ParameterError(f"{where}.tool_calls", f"must be a list, got {tool_calls!r:.80}")
    if tool_calls:
        normalized["tool_calls"] = [
            _normalize_tool_call(call, f"{where}.tool_calls[{i}]")
            for i, call in enumerate(tool_calls)
        ]
    else:
        normalized.pop("tool_calls", None)
    reasoning = next((message[name] for name in _REASONING if message.get(name)), None)
    if reasoning is not None:
        normalized |= {"reasoning_content": reasoning, "thinking": reasoning}
    content = message.get("content")
    if content is None:
        normalized["content"] = None if tool_calls and traits.reads_null else ""
    else:
        normalized["content"] = _normalize_content(content, f"{where}.content", traits)
    return normalized


def _normalize_content(content: Any, where: str, traits: TemplateTraits) -> Any:
    if isinstance(content, str):
        if traits.reads_strings:
            return content
        return [{"type": "text", "text": content}]
    if not isinstance(content, Sequence):
        raise ParameterError(where, f"must be a string or a list of parts, got {content!r:.80}")
    texts = [_text_of(part, f"{where}[{i}]") for i, part in enumerate(content)]
    if traits.reads_parts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _text_of(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise ParameterError(
            f"{where}.type", f"{kind!r} is not supported by this model; only 'text' is"
        )
    text = part.get(field)
    if not isinstance(text, str):
        raise ParameterError(f"{where}.{field}", f"must be a string, got {text!r:.80}")
    return text


def _normalize_tool_call(call: Any, where: str) -> dict[str, Any]:
    """Arguments become an object: that is what templates write out."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ParameterError(f"{where}.function.name", "must be a string")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ParameterError(
                f"{where}.function.arguments", f"is not valid JSON: {error}"
            ) from error
        except RecursionError as error:
            raise ParameterError(
                f"{where}.function.arguments", "must not be nested so deeply"
            ) from error
    return {**call, "function": {**function, "arguments": arguments}}
