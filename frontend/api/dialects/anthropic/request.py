"""Translate requests of Anthropic's Messages API to chat completion requests.

The API is described at https://docs.anthropic.com/en/api/messages. Cache control has no effect, because prefixes are
always cached. Signatures of thinking blocks are empty, and are not checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ....http.errors import bad_request, expect, wrong
from ...bodies.conversion import read_part
from ...logprobs import Json
from ...schema import AgentChat, ChatCompletionRequest
from ...schema.anthropic import MessagesRequest, OutputConfig, ToolChoice
from .blocks import (
    AssistantMessage,
    Compaction,
    Conversation,
    Document,
    Image,
    InputBlock,
    Message,
    NewTool,
    Pdf,
    SearchResult,
    ServerBlock,
    Text,
    Thinking,
    ToolAddition,
    ToolReference,
    ToolRemoval,
    ToolResult,
    ToolUse,
)
from .tools import CLIENT_TOOLS, client_tool

MAX_USER_CHARACTERS: Final = 256

_LEFT_OUT: Final = (
    "container_upload",
    "fallback",
    "mcp_tool_listing",
    "mcp_tool_use",
    "redacted_thinking",
    "server_tool_use",
)
"""Blocks that only Anthropic's servers can use. They are dropped from conversations that began there."""

_SERVER_BLOCK: Final = ServerBlock.__struct_config__.tag
_SERVER_RESULT: Final = "_tool_result"
"""The end of the types of blocks with results of tools that Anthropic's servers ran."""

_FILE: Final = ".file.file_data"
_DATA: Final = ".source.data"
"""The place of a PDF document in a part of a chat, and in a block."""

_SUMMARY: Final = "Summary of the conversation before this message:"


class MessagesPrompt(AgentChat, kw_only=True):
    """A chat completion request from Anthropic's API.

    If `only_computes_prompt`, the prompt is computed for later requests that begin with it, and the answer is empty.
    """

    only_computes_prompt: bool = False

    def sent_name(self, name: str) -> str:
        """Return the name of a field in Anthropic's API."""
        return "stop_sequences" if name == "stop" else name.replace(_FILE, _DATA)


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
    only_computes_prompt = body.max_tokens == 0
    if only_computes_prompt and body.stream:
        raise bad_request("stream", "must be false if max_tokens is 0, because the answer is empty")
    known = {"messages": [_with_known_blocks(message) for message in body.messages]}
    given = read_part(known, Conversation).messages
    deferred = _deferred_tools(body)
    messages = [*_system(body.system)]
    for message in given:
        if (summary := _summary_in(message)) is not None:
            # A summary stands for everything before it.
            text = f"{_SUMMARY}\n\n{summary}"
            messages = [*_system(body.system), {"role": "user", "content": text}]
        messages += _translate(message, deferred)
    is_prefilled = bool(messages) and messages[-1]["role"] == "assistant"
    choice, is_parallel = _tool_choice(body.tool_choice)
    loaded = deferred.keys() & _found_tools(given)
    return MessagesPrompt(
        loaded_tools=frozenset(loaded),
        model=body.model,
        messages=messages,
        # A prompt is computed for its first token.
        max_tokens=1 if only_computes_prompt else body.max_tokens,
        only_computes_prompt=only_computes_prompt,
        stream=body.stream,
        stop=body.stop_sequences or None,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        tools=_tools(body, given, deferred.keys() - loaded) or None,
        tool_choice=choice,
        parallel_tool_calls=is_parallel,
        response_format=_response_format(body),
        user=_user(body.metadata),
        priority=body.priority,
        cache_salt=body.cache_salt,
        chat_template_kwargs=body.chat_template_kwargs,
        kv_transfer_params=body.kv_transfer_params,
        continue_final_message=is_prefilled or None,
        **_thinking(body),
    )


def _system(system: str | list[dict[str, Any]] | None) -> list[Json]:
    if not system:
        return []
    content: Any = system
    if not isinstance(system, str):
        blocks = (read_part(block, Text, f"system[{i}]") for i, block in enumerate(system))
        content = [_text(block.text) for block in blocks]
    return [{"role": "system", "content": content}]


def _with_known_blocks(message: Json) -> Json:
    """Return a message with one type for all blocks that only Anthropic's servers can use."""
    if message.get("role") == "assistant" and isinstance(blocks := message.get("content"), list):
        return message | {"content": [_known(block) for block in blocks]}
    return message


def _known(block: Any) -> Any:
    match block:
        case {"type": str() as kind} if kind in _LEFT_OUT:
            return {"type": _SERVER_BLOCK}
        case {"type": str() as kind} if kind.endswith(_SERVER_RESULT):
            return {"type": _SERVER_BLOCK, "content": block.get("content")}
    return block


def _summary_in(message: Message) -> str | None:
    """Return the summary in the last block of a message that has one; None if there is none."""
    found = None
    for block in message.content:
        if isinstance(block, Compaction) and block.content is not None:
            found = block.content
    return found


def _translate(message: Message, deferred: Mapping[str, Json]) -> list[Json]:
    """Return the translation of a message to one or more messages. Tool results become separate messages.

    The definitions of `deferred` tools replace the references to them.
    """
    if isinstance(message, AssistantMessage):
        return _assistant_message(message)
    role = message.__struct_config__.tag
    if isinstance(message.content, str):
        return [{"role": role, "content": message.content}]
    messages: list[Json] = []
    parts: list[Json] = []
    for block in message.content:
        match block:
            case ToolResult():
                content: Any = block.content or ""
                if not isinstance(content, str):
                    content = [_input_part(each, deferred) for each in content]
                result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
                messages.append(result)
            case Compaction():
                if block.content is not None:
                    messages, parts = [], []
            case ToolAddition() | ToolRemoval():
                pass
            case _:
                parts.append(_input_part(block, deferred))
    if parts or not message.content:
        messages.append({"role": role, "content": parts})
    return messages


def _assistant_message(message: AssistantMessage) -> list[Json]:
    if isinstance(message.content, str):
        return [{"role": "assistant", "content": message.content}]
    parts: list[Json] = []
    reasoning: list[str] = []
    calls: list[Json] = []
    has_summary = False
    for block in message.content:
        match block:
            case Text():
                parts.append(_text(block.text))
            case Thinking():
                reasoning.append(block.thinking)
            case ToolUse():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case Compaction():
                if block.content is not None:
                    parts, reasoning, calls, has_summary = [], [], [], True
            case ServerBlock(content=list() as content):
                parts += [_text(each["text"]) for each in content if _has_text(each)]
    translated: Json = {"role": "assistant", "content": parts or None}
    if reasoning:
        translated["reasoning_content"] = "".join(reasoning)
    if calls:
        translated["tool_calls"] = calls
    return [] if has_summary and len(translated) == 2 and not parts else [translated]


def _has_text(block: Any) -> bool:
    return isinstance(block, dict) and isinstance(block.get("text"), str)


def _input_part(block: InputBlock, deferred: Mapping[str, Json]) -> Json:
    """Return the translation of a content block of a user or a tool to a content part."""
    match block:
        case Text():
            return _text(block.text)
        case Image():
            return {"type": "image_url", "image_url": {"url": block.source.url}}
        case Document():
            source = block.source
            if isinstance(source, Pdf):
                file = {"filename": block.title, "file_data": source.url}
                return {"type": "file", "file": file}
            return _text(f"{block.title}\n\n{source.text}" if block.title else source.text)
        case SearchResult():
            lines = [block.title or "", *(each.text for each in block.content)]
            return _text("\n".join(lines).strip())
        case _:
            tool = deferred.get(block.tool_name)
            return _text(block.tool_name if tool is None else msgspec.json.encode(tool).decode())


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _deferred_tools(body: MessagesRequest) -> dict[str, Json]:
    """Return name -> tool, for the tools that the model sees only if a search finds them.

    Their definitions are in the results of the search, so that the prompt before it stays in the prefix cache.
    """
    return {
        name: _tool(tool, f"tools[{i}]")
        for i, tool in enumerate(body.tools or ())
        if tool.get("defer_loading") is True and isinstance(name := tool.get("name"), str)
    }


def _found_tools(messages: list[Message]) -> set[str]:
    """Return the names of the tools that searches for tools found."""
    return {
        part.tool_name
        for message in messages
        for block in message.content
        if isinstance(block, ToolResult) and isinstance(block.content, list)
        for part in block.content
        if isinstance(part, ToolReference)
    }


def _tools(body: MessagesRequest, messages: list[Message], hidden: set[str]) -> list[Json]:
    """Return the tools that the model may call after all changes in the messages. `hidden` ones were not found yet."""
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    changes = [
        (block, f"messages[{i}].content[{j}].tool")
        for i, message in enumerate(messages)
        for j, block in enumerate(message.content)
        if isinstance(block, ToolAddition | ToolRemoval)
    ]
    if not (changes or hidden):
        return tools
    known = {_name_of(tool, f"tools[{i}]"): tool for i, tool in enumerate(tools)}
    offered = {name: tool for name, tool in known.items() if name not in hidden}
    for block, where in changes:
        if isinstance(block.tool, NewTool):
            tool = _tool(block.tool.definition, f"{where}.definition")
            name = _name_of(tool, f"{where}.definition")
            known[name] = tool
        elif (name := block.tool.name) not in known:
            raise wrong(f"{where}.name", "the name of an earlier tool", name)
        if isinstance(block, ToolAddition):
            offered[name] = known[name]
        else:
            offered.pop(name, None)
    return list(offered.values())


def _name_of(tool: Json, where: str) -> str:
    name = tool["function"]["name"]
    if not (isinstance(name, str) and name):
        raise wrong(f"{where}.name", "a non-empty string", name)
    return name


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


def _tool_choice(choice: ToolChoice | None) -> tuple[str | Json | None, bool | None]:
    """Return the tool choice in OpenAI's format, and whether calls may be parallel; None for the default."""
    if choice is None:
        return None, None
    is_parallel = False if choice.disable_parallel_tool_use else None
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type, is_parallel
    if choice.name is None:
        raise bad_request("tool_choice.name", "is required")
    return {"type": "function", "function": {"name": choice.name}}, is_parallel


def _response_format(body: MessagesRequest) -> Json | None:
    form = (body.output_config or OutputConfig()).format or body.output_format
    if form is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.schema}}


def _thinking(body: MessagesRequest) -> Json:
    """Return the fields that enable or disable reasoning."""
    fields: Json = {"reasoning_effort": (body.output_config or OutputConfig()).effort}
    if (thinking := body.thinking) is not None:
        if thinking.type != "adaptive":
            fields["thinking"] = {"type": thinking.type}
        if thinking.display == "omitted":
            fields["include_reasoning"] = False
    return fields


def _user(metadata: Json | None) -> str | None:
    user = (metadata or {}).get("user_id")
    return user[:MAX_USER_CHARACTERS] if isinstance(user, str) else None
