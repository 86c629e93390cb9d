"""`POST /v1/systemone`: TypeSafe's form of decisions, which is translated to OpenAI's."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
from starlette.types import Receive

from ...client.engine_client import Delta
from ...http.errors import bad_request, expect, reject_deep_nesting, renamer, renaming, wrong
from ..endpoint import NewAnswer
from ..generation import PreparedPrompt
from ..logprobs import Json
from ..schema import ChatCompletionRequest
from ..schema.decisions import (
    DecisionChoice,
    DecisionLevel,
    DecisionQuestion,
    DecisionRequest,
    SystemOneRequest,
)
from .endpoint import DecisionAnswer, Decisions
from .request import LABELS, MAX_LEVELS, NO_THINKING, DecisionChat, translate, verify_count

_rename = renamer({"input": "state"})

_ITEM: Final = re.compile(r"input\[(\d+)\]")

_NOUL: Final = "noul"
"""The type of questions that are true or false. The answer is the probability of true."""


class SystemOneChat(DecisionChat, kw_only=True):
    """A request in TypeSafe's form. `places` are the names of the items in the body."""

    places: list[str] = msgspec.field(default_factory=list)


class SystemOne(Decisions):
    """Answers the questions of a request in TypeSafe's form."""

    body_schema = SystemOneRequest

    async def _translate(self, body: SystemOneRequest, size: int) -> ChatCompletionRequest:
        return await self._serving.executor.run(size, _translate, body)

    async def prepare(
        self, request: ChatCompletionRequest, body_size: int, receive: Receive
    ) -> tuple[list[PreparedPrompt], NewAnswer[ChatCompletionRequest]]:
        """Return the prompt of each question, and the constructor of the answer."""
        assert isinstance(request, SystemOneChat)
        with renaming(partial(_place, request.places)):
            prompts, _ = await super().prepare(request, body_size, receive)
        return prompts, partial(SystemOneAnswer, self._serving, request)


def _translate(body: SystemOneRequest) -> SystemOneChat:
    """Return the body translated to a chat completion request.

    Raises:
        APIError: A field is invalid; it is named as in the body (400).
    """
    if body.state is None or body.state == "":
        raise bad_request("state", "is required")
    if not body.questions:
        raise bad_request("questions", "is required and must not be empty")
    for name in ("audio", "videos"):
        if given := getattr(body, name):
            raise wrong(name, f"empty, because decisions read no {name}", given)
    variables = body.chat_template_kwargs or {}
    for name in NO_THINKING.keys() & variables:
        if variables[name]:
            raise wrong(f"chat_template_kwargs.{name}", "false for a decision", variables[name])
    questions = [
        _question(name, question, f"questions.{name}") for name, question in body.questions.items()
    ]
    items, places = _input(body)
    request = DecisionRequest(
        model=body.model,
        input=items,
        questions=questions,
        priority=body.priority,
        cache_salt=body.cache_salt,
        user=body.user,
    )
    with renaming(partial(_place, places)):
        chat = translate(request, min_choices=1)
    fields = {name: getattr(chat, name) for name in chat.__struct_fields__}
    fields["chat_template_kwargs"] = variables | NO_THINKING
    return SystemOneChat(**fields, places=places)


def _place(places: list[str], name: str) -> str:
    """Return the name of a field of the translated request, or of a place in it, in the body."""
    if (found := _ITEM.match(name)) is None:
        return _rename(name)
    place = places[int(found[1])]
    return place if place == "images" else place + name[found.end() :]


def _input(body: SystemOneRequest) -> tuple[list[Json], list[str]]:
    """Return items of the Responses API, and the name of the field in the body from which each is made.

    The instructions are first, then the state, then the images.
    """
    state = body.state
    is_chat = isinstance(state, list) and all(
        isinstance(each, dict) and "role" in each and "content" in each for each in state
    )
    items = [_item(message) for message in state] if is_chat and state else []
    places = [f"state[{i}]" for i in range(len(items))]
    if not items:
        text = state
        if not isinstance(state, str):
            with reject_deep_nesting("state"):
                text = msgspec.json.encode(state).decode()
        items = [{"role": "user", "content": [{"type": "input_text", "text": text}]}]
        places = ["state"]
    if body.instructions:
        items.insert(0, {"role": "system", "content": body.instructions})
        places.insert(0, "instructions")
    if body.images:
        shown = [{"type": "input_image", "image_url": url} for url in body.images]
        items.append({"role": "user", "content": shown})
        places.append("images")
    return items, places


def _item(message: Json) -> Json:
    """Return a chat message as an item of the Responses API."""
    content = message["content"]
    if not isinstance(content, list):
        return {"role": message["role"], "content": content}
    parts: list[Any] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            parts.append(part | {"type": "input_text"})
        elif kind == "image_url":
            image = part.get("image_url")
            url = image.get("url") if isinstance(image, dict) else image
            parts.append({"type": "input_image", "image_url": url})
        else:
            parts.append(part)
    return {"role": message["role"], "content": parts}


def _question(name: str, question: Json, where: str) -> DecisionQuestion:
    instructions, criteria = question.get("instructions") or "", question.get("criteria")
    if not (instructions or criteria) or not isinstance(instructions, str | list | dict):
        raise wrong(f"{where}.instructions", "a text, an object or an array", instructions)
    if not isinstance(instructions, str):
        with reject_deep_nesting(f"{where}.instructions"):
            instructions = msgspec.json.encode(instructions).decode()
    place = f"{where}.criteria"
    kind = question.get("type")
    if kind == _NOUL:
        meanings = expect(criteria or {}, dict, place, "an object")
        texts = [f"{key}: {meanings[key]}" for key in ("true", "false") if meanings.get(key)]
        return DecisionQuestion(
            type="predicate", instructions="\n".join([instructions, *texts]).lstrip(), name=name
        )
    if kind == "choice":
        options = expect(criteria, dict, place, "an object")
        verify_count(len(options), len(LABELS), place, 1)
        choices = [
            DecisionChoice(value=value, description=_description(text, f"{place}.{value}"))
            for value, text in options.items()
        ]
        return DecisionQuestion(
            type="choice", instructions=instructions, name=name, choices=choices
        )
    if kind == "score":
        given = expect(criteria, list, place, "an array of texts")
        verify_count(len(given), MAX_LEVELS, place)
        levels = [
            DecisionLevel(label=expect(level, str, f"{place}[{i}]", "a string"))
            for i, level in enumerate(given)
        ]
        return DecisionQuestion(type="score", instructions=instructions, name=name, levels=levels)
    raise wrong(f"{where}.type", '"choice", "score" or "noul"', kind)


def _description(text: Any, where: str) -> str | None:
    found: str | None = None if text is None else expect(text, str, where, "a string")
    return found


class SystemOneAnswer(DecisionAnswer):
    """The answers to all questions, by their names."""

    def whole(self, outputs: list[Delta]) -> Json:
        """Return the complete response body."""
        answer = super().whole(outputs)
        answers = {each["name"]: _answer(each) for each in answer["answers"]}
        usage = {"input_tokens": answer["usage"]["input_tokens"], "output_tokens": 0}
        return {
            "id": self.envelope["id"],
            "object": "structured_decision",
            "created": self.envelope["created"],
            "model": answer["model"],
            "answers": answers,
            "usage": usage,
            "diagnostics": dict(zip(answers, map(_diagnosis, outputs), strict=True)),
        }


def _diagnosis(output: Delta) -> Json:
    """Return the probability of all labels together, and if one of them is the most probable token."""
    [position] = output.logprobs or ()
    labels, logprobs = zip(*position.top, strict=True)
    return {
        "label_mass": float(np.exp(logprobs).sum()),
        "argmax_is_label": output.token_ids[0] in labels,
    }


def _answer(answer: Json) -> Json:
    """Return an answer of the Decisions API in TypeSafe's form."""
    if answer["type"] == "predicate":
        share = answer["probability"]
        probabilities = {"yes": share, "no": 1 - share}
        return {"type": _NOUL, _NOUL: share, "probabilities": probabilities}
    options = answer["probabilities"]
    shares = [option["probability"] for option in options]
    names = [str(option["value"]) for option in options]
    found: Json = {"type": answer["type"], "probabilities": dict(zip(names, shares, strict=True))}
    if answer["type"] == "choice":
        most, even = max(shares), 1 / len(shares)
        # The share of a single option is always 1.
        confidence = answer["confidence"] if even == 1 else max(0.0, (most - even) / (1 - even))
        return found | {"choice": answer["choice"], "confidence": confidence}
    best = shares.index(max(shares))
    spread = sum(share * abs(i - best) for i, share in enumerate(shares))
    middle = (len(shares) - 1) / 2
    even = sum(abs(i - middle) for i in range(len(shares))) / len(shares)
    legend = {name: option["label"] for name, option in zip(names, options, strict=True)}
    found |= {"legend": legend, "score": answer["score"]}
    return found | {"confidence": max(0.0, 1 - spread / even)}
