"""Translate requests of the Decisions API to conversations, one for each question."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ...http.errors import bad_request, expect_text, wrong
from ..logprobs import Json
from ..prompts import verify_num_sequences
from ..responses.items import MessageBuilder, normalize_input
from ..schema import ChatCompletionRequest
from ..schema.decisions import DecisionQuestion, DecisionRequest

LABELS: Final = tuple(string.ascii_uppercase)
"""The labels of options. The model answers with one of them, so each must be one token."""

MAX_LEVELS: Final = 10

NO_THINKING: Final = {"enable_thinking": False, "thinking": False}
"""The variables of chat templates that turn reasoning off."""

_PREDICATE: Final = (("true", None), ("false", None))
_TASK: Final = "Answer with the letter of the option that fits best, and nothing else."


@dataclass(frozen=True, slots=True)
class Question:
    """A verified question. `options` are the names and the descriptions of its options."""

    body: DecisionQuestion
    options: tuple[tuple[str, str | None], ...]


class DecisionChat(ChatCompletionRequest, kw_only=True):
    """A chat completion request with questions about `items`. Each answer is one token."""

    items: list[Json] = msgspec.field(default_factory=list)
    questions: Any = None


def translate(body: DecisionRequest, min_choices: int = 2) -> DecisionChat:
    """Return the request translated to a chat completion request. A choice is among at least `min_choices` values.

    Raises:
        APIError: A field is invalid or not supported (400).
    """
    if not body.input:
        raise bad_request("input", "is required and must not be empty")
    if not body.questions:
        raise bad_request("questions", "is required and must not be empty")
    verify_num_sequences(len(body.questions), "questions")
    questions = [
        Question(question, _options(question, f"questions[{i}]", min_choices))
        for i, question in enumerate(body.questions)
    ]
    items = normalize_input(body.input, "decision", "input")
    items = [_with_json_as_text(item, f"input[{i}]") for i, item in enumerate(items)]
    return DecisionChat(
        items=items,
        questions=questions,
        model=body.model,
        max_tokens=1,
        temperature=0.0,
        logprobs=True,
        chat_template_kwargs=NO_THINKING,
        priority=body.priority,
        cache_salt=body.cache_salt,
        user=body.user,
    )


def _options(
    question: DecisionQuestion, where: str, min_choices: int
) -> tuple[tuple[str, str | None], ...]:
    match question.type:
        case "predicate":
            return _PREDICATE
        case "choice":
            choices, place = question.choices or [], f"{where}.choices"
            verify_count(len(choices), len(LABELS), place, min_choices)
            values = [(type(choice.value), choice.value) for choice in choices]
            if len(set(values)) < len(values):
                raise bad_request(place, "must have different values")
            return tuple((_name(choice.value), choice.description) for choice in choices)
        case "score":
            levels = question.levels or []
            verify_count(len(levels), MAX_LEVELS, f"{where}.levels")
            return tuple((level.label, level.description) for level in levels)
        case kind:
            raise wrong(f"{where}.type", '"predicate", "choice" or "score"', kind)


def verify_count(count: int, limit: int, place: str, least: int = 2) -> None:
    """Raise APIError 400 unless a question has `least` to `limit` options."""
    if not least <= count <= limit:
        raise bad_request(place, f"must have {least} to {limit} entries, got {count}")


def _name(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def write_conversation(items: list[Json], question: Question, where: str) -> list[Json]:
    """Return the messages of the input with the question at their end.

    Raises:
        APIError: An item, or the question at `where` in the body, is invalid (400).
    """
    instructions = question.body.instructions
    if isinstance(instructions, str):
        instructions = [_text(instructions)] if instructions else []
    place = f"{where}.instructions"
    parts = [_question_part(part, f"{place}[{i}]") for i, part in enumerate(instructions)]
    options = [
        f"{label}. {name}: {description}" if description else f"{label}. {name}"
        for label, (name, description) in zip(LABELS, question.options, strict=False)
    ]
    parts.append(_text("\n".join([*options, _TASK])))
    message: Json = {"type": "message", "role": "user", "content": []}
    last = items[-1]
    if last.get("role") == "user" and isinstance(last.get("content"), list):
        # Many chat templates do not allow two messages of the user in a row.
        message, items = last, items[:-1]
    content = _join_texts([*message["content"], *parts])
    builder = MessageBuilder()
    builder.add_items([*items, message | {"content": content}], "input")
    return builder.messages


def _question_part(part: Json, where: str) -> Json:
    match part.get("type"):
        case "input_text":
            expect_text(part, "text", where)
        case "input_image":
            expect_text(part, "image_url", where)
        case "input_json":
            return _json_as_text(part, where)
        case kind:
            raise wrong(f"{where}.type", '"input_text", "input_image" or "input_json"', kind)
    return part


def _with_json_as_text(item: Json, where: str) -> Json:
    """Return an item whose parts of type `input_json` are texts."""
    content = item.get("content")
    if not isinstance(content, list):
        return item
    parts = [
        _json_as_text(part, f"{where}.content[{i}]")
        if isinstance(part, dict) and part.get("type") == "input_json"
        else part
        for i, part in enumerate(content)
    ]
    return item | {"content": parts}


def _json_as_text(part: Json, where: str) -> Json:
    data = part.get("data")
    if not isinstance(data, dict | list):
        raise wrong(f"{where}.data", "an object or an array of objects", data)
    return _text(msgspec.json.encode(data).decode())


def _join_texts(parts: list[Any]) -> list[Any]:
    """Return content parts with successive texts as one, because chat templates separate them in different ways."""
    joined: list[Any] = []
    for part in parts:
        text = _text_of(part)
        before = _text_of(joined[-1]) if joined else None
        if text is not None and before is not None:
            joined[-1] = _text(f"{before}\n\n{text}")
        else:
            joined.append(part)
    return joined


def _text_of(part: Any) -> str | None:
    """Return the text of a content part of type `input_text`; None for others and invalid ones."""
    if isinstance(part, dict) and part.get("type") == "input_text":
        text = part.get("text")
        return text if isinstance(text, str) else None
    return None


def _text(text: str) -> Json:
    return {"type": "input_text", "text": text}
