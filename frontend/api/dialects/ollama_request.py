"""Translate requests of Ollama's API to chat completion requests.

The API is described at https://github.com/ollama/ollama/blob/main/docs/api.md. Options for loading a model have no
effect, because the model is already loaded.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any, Final

import msgspec

from ...http.errors import bad_request, echo, expect, wrong
from ..logprobs import Json
from ..schema import ChatCompletionRequest
from ..schema.ollama import OllamaChatRequest, OllamaFields, OllamaGenerateRequest, OllamaOptions

LATEST: Final = ":latest"
"""The tag that clients append to names without one."""

_OPTIONS: Final = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repetition_penalty",
}
"""Name of an option -> the sampling parameter that it sets."""

_SENT_OPTIONS: Final = {
    "max_tokens": "options.num_predict",
    "stop": "options.stop",
    **{parameter: f"options.{option}" for option, parameter in _OPTIONS.items()},
}
"""Name of a sampling parameter -> its place in the body."""

_NEUTRAL: Final = {"mirostat": 0, "tfs_z": 1}
"""Options that are rejected unless they have the value that has no effect."""

UNLOAD: Final = "unload"
"""The reason in the answer to a request that unloads the model."""

_NO_TIME: Final = re.compile(r"[+-]?0[0.hmnsuµ]*")
"""A duration of zero, such as 0s."""

_CONTENT: Final = re.compile(r"messages\[(\d+)\]\.content(?:\[(\d+)\])?")


class OllamaPrompt(ChatCompletionRequest, kw_only=True):
    """A chat completion request that may have a prompt instead of messages.

    `raw` is a prompt to which no chat template is applied. With `middle_before`, the model fills in the middle: `raw`
    follows the answer. A request without a prompt has the `done_reason` of its answer: "load" or "unload".

    The parts of a message's content represent its images and its text. `num_images` has the number of images of each
    message. If the body has no messages, the text is in one of `content_fields`.
    """

    raw: str | None = None
    middle_before: str | None = None
    done_reason: str = ""
    content_fields: tuple[str, ...] = ()
    num_images: dict[int, int] = msgspec.field(default_factory=dict)

    def sent_name(self, name: str) -> str:
        """Return the place in Ollama's body for a place in the chat completion request."""
        match = _CONTENT.match(name)
        if match is None:
            return _SENT_OPTIONS.get(name, name)
        index, part = int(match[1]), match[2]
        before = "" if self.content_fields else f"messages[{index}]."
        num_images = self.num_images.get(index, 0)
        if part is not None and int(part) < num_images:
            return f"{before}images[{part}]"
        if self.content_fields:
            return self.content_fields[index]
        return f"{before}content" if num_images else name


def translate_chat(body: OllamaChatRequest, model: str | None) -> OllamaPrompt:
    """Return the body translated to a chat completion request for `model`. Raise APIError 400 if a field is invalid."""
    calls: deque[str] = deque()
    messages = [
        _message(message, f"messages[{i}]", calls) for i, message in enumerate(body.messages or ())
    ]
    return OllamaPrompt(
        model=model,
        messages=messages,
        tools=body.tools,
        done_reason="" if messages else reason_without_prompt(body.keep_alive),
        num_images={
            i: len(images)
            for i, message in enumerate(body.messages or ())
            if (images := message.get("images"))
        },
        **_common(body),
    )


def translate_generate(body: OllamaGenerateRequest, model: str | None) -> OllamaPrompt:
    """Return the body translated to a chat completion request for `model`.

    Raises:
        APIError: A field is invalid or not supported (400).
    """
    for name, advice in (
        ("template", "start the server with --chat-template"),
        ("context", "use /api/chat"),
    ):
        if value := getattr(body, name):
            raise bad_request(name, f"is not supported; {advice}, got {echo(value)}")
    prompt = body.prompt or ""
    user: Json = {"role": "user", "content": prompt}
    if body.images:
        user = _with_images(user, body.images, "images")
    messages, fields = [user], ["prompt"]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
        fields.insert(0, "system")
    return OllamaPrompt(
        model=model,
        messages=messages,
        raw=prompt if body.raw or body.suffix else None,
        middle_before=body.suffix or None,
        done_reason="" if prompt or body.images else reason_without_prompt(body.keep_alive),
        content_fields=tuple(fields),
        num_images={len(messages) - 1: len(body.images or ())},
        **_common(body),
    )


def reason_without_prompt(keep_alive: float | str | None) -> str:
    """Return what a request without a prompt does to the model: "load" or "unload"."""
    is_zero = keep_alive == 0 or (isinstance(keep_alive, str) and _NO_TIME.fullmatch(keep_alive))
    return UNLOAD if is_zero else "load"


def _common(body: OllamaFields) -> Json:
    """Return all translated fields except the conversation."""
    fields = _sampling_fields(body.options or OllamaOptions()) | {
        "stream": body.stream is not False
    }
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        schema = {"name": "format", "schema": body.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif body.format:
        raise wrong("format", '"json" or a JSON schema', body.format)
    if isinstance(body.think, bool):
        fields["thinking"] = {"type": "enabled" if body.think else "disabled"}
    elif body.think:
        fields["reasoning_effort"] = body.think
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return fields


def _sampling_fields(options: OllamaOptions) -> Json:
    fields = {name: getattr(options, option) for option, name in _OPTIONS.items()}
    if options.repeat_last_n == 0:
        # The penalty applies to no tokens.
        fields["repetition_penalty"] = 1.0
    for option, neutral in _NEUTRAL.items():
        if (value := getattr(options, option)) not in (None, neutral):
            problem = f"is not supported; leave it out, got {echo(value)}"
            raise bad_request(f"options.{option}", problem)
    # Ollama uses -1, -2 and 0 for as many tokens as fit.
    fields["max_tokens"] = options.num_predict if (options.num_predict or 0) > 0 else None
    return fields | {"stop": options.stop or None}


def _message(message: Json, where: str, calls: deque[str]) -> Json:
    """Return a message in OpenAI's format.

    `calls` holds the IDs of the calls without a result so far, because Ollama's messages have no IDs.
    """
    kept = {
        name: message[name]
        for name in ("role", "content", "thinking", "tool_call_id")
        if message.get(name) is not None
    }
    if images := message.get("images"):
        kept = _with_images(kept, images, f"{where}.images")
    if tool_calls := message.get("tool_calls"):
        expect(tool_calls, list, f"{where}.tool_calls", "an array")
        calls.clear()
        kept["tool_calls"] = []
        for i, call in enumerate(tool_calls):
            place = f"{where}.tool_calls[{i}]"
            function = expect(call, dict, place, "an object").get("function")
            # Every known template accepts IDs of nine letters and digits.
            call_id = call.get("id") or f"call{len(kept['tool_calls']):05}"
            calls.append(call_id)
            kept["tool_calls"].append({"id": call_id, "type": "function", "function": function})
    elif message.get("role") == "tool":
        if (name := message.get("tool_name")) is not None:
            kept["name"] = name
        kept.setdefault("tool_call_id", calls.popleft() if calls else "call00000")
    return kept


def _with_images(message: Json, images: Any, where: str) -> Json:
    """Return the message with its images before its text. The images are base64 without a media type."""
    parts: list[Json] = []
    for i, image in enumerate(expect(images, list, where, "an array")):
        data = expect(image, str, f"{where}[{i}]", "an image in base64")
        url = data if data.startswith(("data:", "https:")) else f"data:image/*;base64,{data}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    if text := message.get("content"):
        parts.append({"type": "text", "text": text})
    return message | {"content": parts}
