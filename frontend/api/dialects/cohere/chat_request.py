"""Translate requests of Cohere's Chat API to chat completion requests.

The API is described at https://docs.cohere.com/v2/reference/chat. Answers have no citations.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ....http.errors import bad_request, expect, expect_text, wrong
from ...logprobs import Json
from ...schema import ChatCompletionRequest
from ...schema.cohere import CohereChatRequest

_NAMES = {"stop": "stop_sequences", "top_k": "k", "top_p": "p"}
_CHOICES = {"REQUIRED": "required", "NONE": "none"}


class CohereChat(ChatCompletionRequest, kw_only=True):
    """A chat completion request from Cohere's API.

    Attributes:
        reads_lines: True if the client reads a stream as lines of JSON instead of server-sent events.
    """

    reads_lines: bool = False

    def sent_name(self, name: str) -> str:
        """Return the name of a field in Cohere's API."""
        return _NAMES.get(name, name)


def translate_chat(
    body: CohereChatRequest, shows_documents: Callable[[], bool]
) -> ChatCompletionRequest:
    """Return the body translated to a chat completion request.

    Args:
        body: The body.
        shows_documents: Returns whether the chat template shows documents. If not, they become a system message.

    Raises:
        APIError: A field is invalid; it is named as in the body (400).
    """
    if body.messages is None:
        raise bad_request("messages", "is required")
    messages = [_message(each, f"messages[{i}]") for i, each in enumerate(body.messages)]
    documents = [_document(each, f"documents[{i}]") for i, each in enumerate(body.documents or ())]
    if documents and not shows_documents():
        text = "\n\n".join(_text_of_document(document) for document in documents)
        messages.insert(0, {"role": "system", "content": f"Documents:\n\n{text}"})
        documents = []
    choice = None
    if body.tool_choice is not None:
        choice = _CHOICES.get(body.tool_choice.upper())
        if choice is None:
            raise wrong("tool_choice", '"REQUIRED" or "NONE"', body.tool_choice)
    return CohereChat(
        model=body.model,
        messages=messages,
        max_tokens=body.max_tokens,
        stream=body.stream,
        stop=body.stop_sequences or None,
        temperature=body.temperature,
        seed=body.seed,
        top_k=body.k or None,
        top_p=body.p or None,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        logprobs=body.logprobs,
        tools=_tools(body) or None,
        tool_choice=choice,
        documents=documents or None,
        response_format=_response_format(body.response_format),
        reasoning_effort=body.reasoning_effort,
        priority=body.priority,
        cache_salt=body.cache_salt,
        chat_template_kwargs=body.chat_template_kwargs,
        **_thinking(body.thinking),
    )


def _message(message: Json, where: str) -> Json:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system", "developer", "tool"):
        raise wrong(f"{where}.role", '"user", "assistant", "system" or "tool"', role)
    translated: Json = {"role": role}
    thoughts: list[str] = []
    if content is None or isinstance(content, str):
        translated["content"] = content
    else:
        blocks = expect(content, list, f"{where}.content", "a string or an array of blocks")
        parts = []
        for i, block in enumerate(blocks):
            place = f"{where}.content[{i}]"
            if expect(block, dict, place, "an object").get("type") == "thinking":
                thoughts.append(expect_text(block, "thinking", place))
            else:
                parts.append(_part(block, place))
        translated["content"] = parts or None
    if role == "assistant":
        thoughts += [message["tool_plan"]] if isinstance(message.get("tool_plan"), str) else []
        if thoughts:
            translated["reasoning_content"] = "".join(thoughts)
        if message.get("tool_calls"):
            translated["tool_calls"] = message["tool_calls"]
    elif role == "tool":
        translated["tool_call_id"] = expect_text(message, "tool_call_id", where)
    return translated


def _part(block: Json, where: str) -> Json:
    match block.get("type"):
        case "text":
            return {"type": "text", "text": expect_text(block, "text", where)}
        case "image_url":
            return {"type": "image_url", "image_url": block.get("image_url")}
        case "document":
            document = _document(block.get("document"), f"{where}.document")
            return {"type": "text", "text": _text_of_document(document)}
        case kind:
            raise wrong(f"{where}.type", "text, image_url, document or thinking", kind)


def _document(document: Any, where: str) -> Json:
    """Return a document as the chat templates of Cohere's models expect it: an object with texts."""
    if isinstance(document, str):
        return {"text": document}
    fields: Json = expect(document, dict, where, "a string or an object")
    data = fields.get("data")
    found: Json = {"text": data} if isinstance(data, str) else {}
    if isinstance(data, dict):
        found = data
    named = {"id": fields["id"]} if isinstance(fields.get("id"), str) else {}
    return named | found


def _text_of_document(document: Json) -> str:
    """Return the fields of a document as text, one a line."""
    return "\n".join(
        f"{name}: {value if isinstance(value, str) else json.dumps(value)}"
        for name, value in document.items()
    )


def _tools(body: CohereChatRequest) -> list[Json]:
    if not body.strict_tools:
        return body.tools or []
    tools = []
    for i, tool in enumerate(body.tools or ()):
        function = expect(tool.get("function"), dict, f"tools[{i}].function", "an object")
        tools.append(tool | {"function": function | {"strict": True}})
    return tools


def _response_format(form: Json | None) -> Json | None:
    if form is None:
        return None
    schema = form.get("json_schema", form.get("schema"))
    if form.get("type") != "json_object" or schema is None:
        return form
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


def _thinking(thinking: Json | None) -> Json:
    """Return the fields that enable, disable or limit reasoning."""
    if thinking is None:
        return {}
    kind = thinking.get("type")
    if kind not in ("enabled", "disabled"):
        raise wrong("thinking.type", '"enabled" or "disabled"', kind)
    return {"thinking": {"type": kind}}
