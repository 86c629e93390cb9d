"""Write tools, calls and results as text, for models whose chat template does not support tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

_INTRODUCTION: Final = """\
You may call these functions. Each line describes one, with its parameters as a JSON schema:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as a JSON object between two tags:
<tool_call>
{{"name": "name of the function", "arguments": {{"name of a parameter": "value"}}}}
</tool_call>

Several calls follow one another. Their results come between <tool_response> and </tool_response>. \
Call a function only if it helps. Otherwise answer in plain text."""

_SHOWN: Final = ("name", "description", "parameters")


def write_tools_as_text(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    reads_system: bool,
    reads_strings: bool,
) -> list[dict[str, Any]]:
    """Return normalized messages without tool calls and results, with the tools in the system message.

    Calls become text of the assistant, in the format that the system message describes. Results become messages of
    the user, together with results and text that follow, because many templates require that users and assistants
    alternate.

    Args:
        messages: The messages.
        tools: The tools that the model may call; None if there are none.
        reads_system: True if the template has a system role. Otherwise the first message describes the tools.
        reads_strings: True if the template reads content that is a string. Otherwise it is a list of parts.
    """
    written: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            message = {"role": "user", "content": _write_result(message["content"])}
        elif "tool_calls" in message:
            message = _with_calls_in_content(message)
        if follows_result and message["role"] == "user":
            written[-1]["content"] = _join(written[-1]["content"], "\n", message["content"])
        else:
            written.append(message)
            follows_result = is_result
    if tools:
        _introduce(tools, written, "system" if reads_system else "user")
    if reads_strings:
        return written
    return [message | {"content": _as_parts(message["content"])} for message in written]


def _introduce(
    tools: Sequence[Mapping[str, Any]], messages: list[dict[str, Any]], role: str
) -> None:
    """Describe the tools in the first message if it has this role, otherwise in a new message before it."""
    lines = "\n".join(_write_tool(tool) for tool in tools)
    text = _INTRODUCTION.format(tools=lines)
    first = messages[0] if messages else {"role": ""}
    if role == "system" and first["role"] in ("system", "developer"):
        messages[0] = first | {"content": _join(first["content"], "\n\n", text)}
    elif first["role"] == role:
        messages[0] = first | {"content": _join(text, "\n\n", first["content"])}
    else:
        messages.insert(0, {"role": role, "content": text})


def _write_tool(tool: Mapping[str, Any]) -> str:
    function = tool.get("function", tool)
    return _encode({name: function[name] for name in _SHOWN if function.get(name) is not None})


def _with_calls_in_content(message: dict[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message["tool_calls"]:
        function = {name: call["function"][name] for name in ("name", "arguments")}
        calls.append(f"<tool_call>\n{_encode(function)}\n</tool_call>")
    content, text = message["content"], "\n".join(calls)
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return others | {"content": _join(content, "\n", text) if content else text}


def _write_result(content: str | list[Any] | None) -> str | list[Any]:
    return _join(_join("<tool_response>\n", "", content), "", "\n</tool_response>")


def _join(
    first: str | list[Any] | None, separator: str, second: str | list[Any] | None
) -> str | list[Any]:
    """Return the concatenation of two contents, each a text or a list of parts."""
    if isinstance(first, list) or isinstance(second, list):
        middle = _as_parts(separator)
        return [*_as_parts(first), *middle, *_as_parts(second)]
    return f"{first or ''}{separator}{second or ''}"


def _as_parts(content: str | list[Any] | None) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content or []


def _encode(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
