"""Translate requests of Anthropic's Messages API to chat completion requests.

The API is described at https://docs.anthropic.com/en/api/messages. Cache control has no effect, because prefixes are
always cached. Signatures of thinking blocks are empty, and are not checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from ....http.errors import bad_request, expect, wrong
from ...logprobs import Json
from ...schema import ChatCompletionRequest
from ...schema.anthropic import MessagesRequest
from .tools import CLIENT_TOOLS, client_tool

MAX_USER_CHARACTERS: Final = 256

_PDF: Final = "application/pdf"

_LEFT_OUT: Final = (
    "container_upload",
    "fallback",
    "mcp_tool_listing",
    "mcp_tool_use",
    "redacted_thinking",
    "server_tool_use",
)
"""Blocks that only Anthropic's servers can use. They are dropped from conversations that began there."""

_SERVER_RESULT: Final = "_tool_result"
"""The end of the types of blocks with results of tools that Anthropic's servers ran."""


_TOOL_CHANGES: Final = ("tool_addition", "tool_removal")
"""Blocks that change which tools the model may call from then on."""

_SUMMARY: Final = "Summary of the conversation before this message:"


class MessagesPrompt(ChatCompletionRequest, kw_only=True):
    """A chat completion request from Anthropic's API."""

    def sent_name(self, name: str) -> str:
        """Return the name of a field in Anthropic's API."""
        return "stop_sequences" if name == "stop" else name


def translate_messages(body: MessagesRequest) -> ChatCompletionRequest:
    """Return the body translated to a chat completion request.

    Raises:
        APIError: A field is invalid; it is named as in the body (400).
    """
    if body.messages is None:
        raise bad_request("messages", "is required")
    if body.mcp_servers:
        raise bad_request("mcp_servers", "is not supported here; send it to /v1/messages")
    if body.thread is not None:
        # Clients recognize this code, and send the whole conversation instead.
        problem = "is not supported; send the whole conversation"
        raise bad_request("thread", problem, code="thread_unsupported_request")
    if body.max_tokens is not None and body.max_tokens < 0:
        raise wrong("max_tokens", "at least 0", body.max_tokens)
    messages = [*_system(body.system)]
    for i, message in enumerate(body.messages):
        if (summary := _summary_in(message)) is not None:
            # A summary stands for everything before it.
            text = f"{_SUMMARY}\n\n{summary}"
            messages = [*_system(body.system), {"role": "user", "content": text}]
        messages += _message(message, f"messages[{i}]")
    is_prefilled = bool(messages) and messages[-1]["role"] == "assistant"
    choice, is_parallel = _tool_choice(body.tool_choice)
    return MessagesPrompt(
        model=body.model,
        messages=messages,
        max_tokens=body.max_tokens,
        stream=body.stream,
        stop=body.stop_sequences or None,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        tools=_tools(body) or None,
        tool_choice=choice,
        parallel_tool_calls=is_parallel,
        response_format=_response_format(body),
        user=_user(body.metadata),
        priority=body.priority,
        cache_salt=body.cache_salt,
        chat_template_kwargs=body.chat_template_kwargs,
        continue_final_message=is_prefilled or None,
        **_thinking(body),
    )


def find_pdfs(body: MessagesRequest) -> list[tuple[Json, str]]:
    """Return the sources of all PDF documents in a body, and their places.

    Raises:
        APIError: A source in base64 is not a PDF document (400).
    """
    found: list[tuple[Json, str]] = []
    for i, message in enumerate(body.messages or ()):
        _find_pdfs(message.get("content"), f"messages[{i}].content", found)
    return found


def _find_pdfs(blocks: Any, where: str, found: list[tuple[Json, str]]) -> None:
    for i, block in enumerate(blocks if isinstance(blocks, list) else ()):
        if not isinstance(block, dict):
            continue
        place = f"{where}[{i}]"
        if block.get("type") == "tool_result":
            _find_pdfs(block.get("content"), f"{place}.content", found)
        source = block.get("source")
        if block.get("type") != "document" or not isinstance(source, dict):
            continue
        if source.get("type") == "base64":
            if source.get("media_type") != _PDF:
                raise wrong(f"{place}.source.media_type", f'"{_PDF}"', source.get("media_type"))
            _string(source, "data", f"{place}.source")
            found.append((source, f"{place}.source"))


def _system(system: str | list[dict[str, Any]] | None) -> list[Json]:
    if not system:
        return []
    if isinstance(system, str):
        return [{"role": "system", "content": system}]
    parts = [_text_block(block, f"system[{i}]") for i, block in enumerate(system)]
    return [{"role": "system", "content": parts}]


def _message(message: Json, where: str) -> list[Json]:
    """Return the translation of a message to one or more messages. Tool results become separate messages."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise wrong(f"{where}.role", '"user", "assistant" or "system"', role)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = expect(content, list, f"{where}.content", "a string or an array of blocks")
    if role == "assistant":
        return _assistant_message(blocks, f"{where}.content")
    messages: list[Json] = []
    is_empty = not blocks
    parts: list[Json] = []
    for i, block in enumerate(blocks):
        place = f"{where}.content[{i}]"
        match _kind_of(block, place):
            case "tool_result":
                messages.append(_tool_result(block, place))
            case "compaction" if block.get("content") is not None:
                messages, parts = [], []
            case kind if kind in ("compaction", *_TOOL_CHANGES):
                pass
            case _:
                parts.append(_input_part(block, place))
    if parts or is_empty:
        messages.append({"role": role, "content": parts})
    return messages


def _summary_in(message: Json) -> str | None:
    """Return the summary in the last block of a message that has one; None if there is none."""
    content = message.get("content")
    found = None
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict) and block.get("type") == "compaction":
            summary = block.get("content")
            found = summary if isinstance(summary, str) else found
    return found


def _assistant_message(blocks: list[Any], where: str) -> list[Json]:
    parts: list[Json] = []
    reasoning: list[str] = []
    calls: list[Json] = []
    has_summary = False
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        match _kind_of(block, place):
            case "text":
                parts.append(_text_block(block, place))
            case "thinking":
                reasoning.append(_string(block, "thinking", place))
            case "tool_use":
                calls.append(_tool_use(block, place))
            case "compaction" if block.get("content") is not None:
                parts, reasoning, calls, has_summary = [], [], [], True
            case kind if kind in ("compaction", *_LEFT_OUT):
                pass
            case str() as kind if kind.endswith(_SERVER_RESULT):
                parts += _texts_of_result(block.get("content"))
            case kind:
                raise wrong(f"{place}.type", "text, thinking, redacted_thinking or tool_use", kind)
    message: Json = {"role": "assistant", "content": parts or None}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return [] if has_summary and len(message) == 2 and not parts else [message]


def _texts_of_result(content: Any) -> list[Json]:
    """Return the texts in the result of a tool that Anthropic's servers ran."""
    blocks = content if isinstance(content, list) else ()
    texts = [block.get("text") for block in blocks if isinstance(block, dict)]
    return [{"type": "text", "text": text} for text in texts if isinstance(text, str)]


def _tool_use(block: Json, where: str) -> Json:
    arguments = expect(block.get("input"), dict, f"{where}.input", "an object")
    function = {"name": _name(block, "name", where), "arguments": arguments}
    return {"id": _name(block, "id", where), "type": "function", "function": function}


def _tool_result(block: Json, where: str) -> Json:
    content = block.get("content")
    if content is not None and not isinstance(content, str):
        blocks = expect(content, list, f"{where}.content", "a string or an array of blocks")
        content = [_input_part(each, f"{where}.content[{i}]") for i, each in enumerate(blocks)]
    call_id = _name(block, "tool_use_id", where)
    return {"role": "tool", "tool_call_id": call_id, "content": content or ""}


def _input_part(block: Any, where: str) -> Json:
    """Return the translation of a content block of a user or a tool to a content part."""
    match _kind_of(block, where):
        case "text":
            return _text_block(block, where)
        case "image":
            return {"type": "image_url", "image_url": {"url": _image_url(block, where)}}
        case "document":
            return {"type": "text", "text": _document(block, where)}
        case "tool_reference":
            return {"type": "text", "text": _name(block, "tool_name", where)}
        case "search_result":
            found = expect(block.get("content"), list, f"{where}.content", "an array of blocks")
            texts = [
                _text_block(part, f"{where}.content[{i}]")["text"] for i, part in enumerate(found)
            ]
            title = "" if block.get("title") is None else _string(block, "title", where)
            return {"type": "text", "text": "\n".join([title, *texts]).strip()}
        case kind:
            raise wrong(
                f"{where}.type", "text, image, document, search_result or tool_result", kind
            )


def _image_url(block: Json, where: str) -> str:
    source = expect(block.get("source"), dict, f"{where}.source", "an object")
    match source.get("type"):
        case "base64":
            media_type = _string(source, "media_type", f"{where}.source")
            return f"data:{media_type};base64,{_string(source, 'data', f'{where}.source')}"
        case "url":
            return _string(source, "url", f"{where}.source")
        case kind:
            raise wrong(f"{where}.source.type", '"base64", "url" or "file"', kind)


def _document(block: Json, where: str) -> str:
    source = expect(block.get("source"), dict, f"{where}.source", "an object")
    match source.get("type"):
        case "text":
            text = _string(source, "data", f"{where}.source")
        case "content":
            content = source.get("content")
            if isinstance(content, str):
                text = content
            else:
                place = f"{where}.source.content"
                blocks = expect(content, list, place, "a string or an array of blocks")
                text = "\n".join(
                    _text_block(part, f"{place}[{i}]")["text"] for i, part in enumerate(blocks)
                )
        case kind:
            raise wrong(f"{where}.source.type", '"text", "content", "base64" or "file"', kind)
    title = block.get("title")
    return f"{title}\n\n{text}" if isinstance(title, str) and title else text


def _text_block(block: Any, where: str) -> Json:
    kind = _kind_of(block, where)
    if kind != "text":
        raise wrong(f"{where}.type", '"text"', kind)
    return {"type": "text", "text": _string(block, "text", where)}


def _kind_of(block: Any, where: str) -> Any:
    return expect(block, dict, where, "an object").get("type")


def _string(fields: Json, name: str, where: str) -> str:
    text: str = expect(fields.get(name), str, f"{where}.{name}", "a string")
    return text


def _name(fields: Json, name: str, where: str) -> str:
    text = _string(fields, name, where)
    if not text:
        raise wrong(f"{where}.{name}", "a non-empty string", text)
    return text


def _tools(body: MessagesRequest) -> list[Json]:
    """Return the tools that the model may call after all changes in the messages."""
    declared = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    changes = [
        (block, f"messages[{i}].content[{j}].tool")
        for i, message in enumerate(body.messages or ())
        for j, block in _tool_changes(message)
    ]
    if not changes:
        return declared
    known: dict[str, Json] = {}
    for i, tool in enumerate(declared):
        known[_name(tool["function"], "name", f"tools[{i}]")] = tool
    offered = dict(known)
    for block, place in changes:
        changed = expect(block.get("tool"), dict, place, "an object")
        if changed.get("type") == "tool_definition" and block["type"] == "tool_addition":
            where = f"{place}.definition"
            definition = expect(changed.get("definition"), dict, where, "a tool")
            tool = _tool(definition, where)
            name = _name(tool["function"], "name", where)
            known[name] = tool
        elif changed.get("type") == "tool_reference":
            name = _name(changed, "name", place)
            if name not in known:
                raise wrong(f"{place}.name", "the name of an earlier tool", name)
        else:
            expected = '"tool_reference" or, to add it, "tool_definition"'
            raise wrong(f"{place}.type", expected, changed.get("type"))
        if block["type"] == "tool_addition":
            offered[name] = known[name]
        else:
            offered.pop(name, None)
    return list(offered.values())


def _tool_changes(message: Json) -> Iterator[tuple[int, Json]]:
    """Yield the blocks of a message that change the tools, with their places."""
    blocks = message.get("content")
    for i, block in enumerate(blocks if isinstance(blocks, list) else ()):
        if isinstance(block, dict) and block.get("type") in _TOOL_CHANGES:
            yield i, block


def _tool(tool: Json, where: str) -> Json:
    kind = tool.get("type")
    if isinstance(kind, str) and kind in CLIENT_TOOLS:
        return client_tool(tool, where)
    if kind not in (None, "custom"):
        expected = (
            f'"custom" or {", ".join(CLIENT_TOOLS)}, because this server runs no tools itself'
        )
        raise wrong(f"{where}.type", expected, kind)
    schema = expect(tool.get("input_schema"), dict, f"{where}.input_schema", "a JSON schema")
    function: Json = {"name": tool.get("name"), "parameters": schema}
    function |= {name: tool[name] for name in ("description", "strict") if name in tool}
    return {"type": "function", "function": function}


def _tool_choice(choice: Json | None) -> tuple[str | Json | None, bool | None]:
    """Return the tool choice in OpenAI's format, and whether calls may be parallel; None for the default."""
    if choice is None:
        return None, None
    is_parallel = False if choice.get("disable_parallel_tool_use") else None
    match choice.get("type"):
        case "auto":
            return "auto", is_parallel
        case "any":
            return "required", is_parallel
        case "none":
            return "none", is_parallel
        case "tool":
            name = _string(choice, "name", "tool_choice")
            return {"type": "function", "function": {"name": name}}, is_parallel
        case kind:
            raise wrong("tool_choice.type", "auto, any, tool or none", kind)


def _response_format(body: MessagesRequest) -> Json | None:
    where, form = "output_config.format", (body.output_config or {}).get("format")
    if form is None:
        where, form = "output_format", body.output_format
    if form is None:
        return None
    kind = expect(form, dict, where, "an object").get("type")
    if kind != "json_schema":
        raise wrong(f"{where}.type", '"json_schema"', kind)
    schema = expect(form.get("schema"), dict, f"{where}.schema", "a JSON schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


def _thinking(body: MessagesRequest) -> Json:
    """Return the fields that enable or disable reasoning."""
    fields: Json = {}
    if (effort := (body.output_config or {}).get("effort")) is not None:
        fields["reasoning_effort"] = expect(effort, str, "output_config.effort", "a string")
    if body.thinking is not None:
        kind = body.thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise wrong("thinking.type", '"enabled", "disabled" or "adaptive"', kind)
        if kind != "adaptive":
            fields["thinking"] = {"type": kind}
        if body.thinking.get("display") == "omitted":
            fields["include_reasoning"] = False
    return fields


def _user(metadata: Json | None) -> str | None:
    user = (metadata or {}).get("user_id")
    return user[:MAX_USER_CHARACTERS] if isinstance(user, str) else None
