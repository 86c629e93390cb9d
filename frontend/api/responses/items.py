"""Parse the items of an input: store them in one format, and translate them to chat messages."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from ...http.errors import bad_request, expect, expect_text, wrong
from ...media.sources.processor_fields import LIMITS_OF_PARTS
from ..inputs.files import translate_file
from ..inputs.stored_files import media_type_of
from ..logprobs import Json
from ..tools.tool_definitions import tools_for_template
from .client_tools import CALLS, OUTPUTS, TOOL_SEARCH, write_output
from .ids import item_id
from .namespaces import full_name, place_loaded_tools

ROLES: Final = ("user", "assistant", "system", "developer")

ENCODED_TEXT: Final = "engine1."
"""Prefix of `encrypted_content`. The text follows in base64; it is not encrypted."""

_ITEM_TYPES: Final = (
    "message, reasoning, function_call, function_call_output, custom_tool_call, "
    f"custom_tool_call_output, {', '.join(CALLS)}, {', '.join(OUTPUTS)}, tool_search_output, "
    "additional_tools, agent_message, compaction, mcp_list_tools, mcp_call, mcp_approval_request, "
    "mcp_approval_response or item_reference"
)
_LEFT_OUT: Final = (
    "additional_tools",
    "mcp_list_tools",
    "code_interpreter_call",
    "file_search_call",
    "image_generation_call",
    "web_search_call",
)
"""Types of items that are left out of the prompt.

They list tools, or are calls that OpenAI's servers ran. The answers after such calls have their results.
"""

_MCP_TEXTS: Final = {
    "mcp_list_tools": ("server_label",),
    "mcp_approval_request": ("server_label", "name", "arguments"),
    "mcp_approval_response": ("approval_request_id",),
}
"""Type of an item -> its texts that are required."""


_SUMMARY: Final = "Summary of the conversation before this message:"

_PART_TYPES: Final = (
    "input_text, input_image, input_video, input_file, input_audio, output_text or refusal"
)


Files: TypeAlias = Mapping[str, tuple[str, bytes]]
"""File identifier -> name and content."""


def file_id_of(part: Json) -> str:
    """Return the stored file that a content part refers to; "" if there is none."""
    found = part.get("file_id")
    return found if isinstance(found, str) else ""


def find_files(items: Iterable[Json]) -> set[str]:
    """Return the identifiers of the stored files that items refer to."""
    found: set[str] = set()
    for item in items:
        for name in ("content", "output"):
            parts = item.get(name)
            if isinstance(parts, list):
                found.update(file_id_of(part) for part in parts if isinstance(part, dict))
    return found - {""}


def _with_content(part: Json, file: tuple[str, bytes]) -> Json:
    """Return a content part with the content of the file that it refers to filled in."""
    filename, content = file
    url = f"data:{media_type_of(filename)};base64,{base64.b64encode(content).decode()}"
    if part["type"] == "input_image":
        return part | {"image_url": url}
    return part | {"file_data": url, "filename": part.get("filename") or filename}


def encode_text(text: str) -> str:
    """Return a text in the format of `encrypted_content`, which clients send back."""
    return ENCODED_TEXT + base64.urlsafe_b64encode(text.encode()).decode()


def normalize_input(
    given: str | list[Json] | None, owner_id: str, param: str, first: int = 0
) -> list[Json]:
    """Return the items of an input, each with its type and an identifier.

    Args:
        given: A text, or the items as the client sent them.
        owner_id: The response or conversation that the items belong to.
        param: The field that errors name.
        first: The number of the first item among those with the same owner.

    Raises:
        APIError: A type or a field of a tool of an MCP server is invalid, or a reference has no identifier (400).
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [
        _normalize(item, f"{param}[{i}]", owner_id, first + i) for i, item in enumerate(given or ())
    ]


def _normalize(item: Json, where: str, owner_id: str, index: int) -> Json:
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    expect(kind, str, f"{where}.type", "a string")
    _verify_mcp(item, kind, where)
    normalized = item | {"type": kind}
    if kind == "message":
        content = item.get("content")
        if isinstance(content, str):
            if item.get("role") == "assistant":
                part: Json = {"type": "output_text", "text": content, "annotations": []}
            else:
                part = {"type": "input_text", "text": content}
            normalized["content"] = [part]
    if kind != "item_reference":
        if not isinstance(item.get("id"), str):
            normalized["id"] = item_id(kind, owner_id, index)
        if kind not in ("reasoning", "compaction"):
            normalized["status"] = item.get("status") or "completed"
    elif not isinstance(item.get("id"), str):
        raise wrong(f"{where}.id", "the id of an item", item.get("id"))
    return normalized


def _verify_mcp(item: Json, kind: str, where: str) -> None:
    """Verify the fields of an item of an MCP server that are read before the items become messages."""
    for name in _MCP_TEXTS.get(kind, ()):
        expect_text(item, name, where)
    if kind == "mcp_call" and item.get("approval_request_id") is not None:
        expect_text(item, "approval_request_id", where)
    if kind == "mcp_list_tools":
        tools = expect(item.get("tools") or [], list, f"{where}.tools", "an array")
        for i, tool in enumerate(tools):
            place = f"{where}.tools[{i}]"
            expect_text(expect(tool, dict, place, "an object"), "name", place)


class MessageBuilder:
    """Translates items to chat messages. Successive items of the model become one message.

    Args:
        files: The stored files that content parts refer to.
    """

    def __init__(self, files: Files | None = None) -> None:
        self.messages: list[Json] = []
        self.places: dict[int, str] = {}
        """The fields of items whose parts are the content of messages, by the number of the message."""
        self._files = files or {}
        self._approvals: dict[str, Json] = {}
        self._open: Json | None = None
        """The last message, if the model wrote it and the next item may be added to it."""

    def add_items(self, items: Iterable[Json], param: str) -> None:
        """Translate items. Raise APIError 400 if a field is invalid."""
        for i, item in enumerate(items):
            self._add_item(item, f"{param}[{i}]")

    def _add_item(self, item: Json, where: str) -> None:
        match item["type"]:
            case "message":
                self._add_message(item, where)
            case "reasoning":
                message = self._begin_turn("reasoning_content", "content", "tool_calls")
                message["reasoning_content"] = _reasoning_of(item, where)
            case "function_call":
                self._add_tool_call(item, where)
            case "custom_tool_call":
                self._add_tool_call(item, where, "custom", "input")
            case kind if kind in CALLS:
                self._add_client_call(item, where)
            case kind if kind in OUTPUTS:
                call_id, text = write_output(item, where)
                self._add_output(item | {"call_id": call_id}, where, text)
            case "tool_search_output":
                if item.get("call_id") is not None:
                    loaded = [each.tool for each in place_loaded_tools(item, where)]
                    shown = {"tools": tools_for_template(loaded, f"{where}.tools")}
                    text = msgspec.json.encode(shown).decode()
                    self._add_output(item, where, text)
            case "agent_message":
                self._open = None
                if text := _agent_message(item, where):
                    self.messages.append({"role": "user", "content": text})
            case kind if kind in _LEFT_OUT:
                pass
            case "compaction":
                self._open = None
                summary = _decode_text(expect_text(item, "encrypted_content", where), where)
                self.messages.append({"role": "user", "content": f"{_SUMMARY}\n\n{summary}"})
            case "mcp_call":
                output = item.get("output")
                if not isinstance(output, str):
                    output = f"Error: {item.get('error')}"
                self._add_mcp_call(item, where, output)
            case "mcp_approval_request":
                self._approvals[expect_text(item, "id", where)] = item
            case "mcp_approval_response":
                self._add_refusal(item, where)
            case "function_call_output" | "custom_tool_call_output":
                self._add_output(item, where, self._output_of(item, where))
            case kind:
                raise wrong(
                    f"{where}.type",
                    f"{_ITEM_TYPES}, because this server runs no tools itself",
                    kind,
                )

    def _add_message(self, item: Json, where: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise wrong(f"{where}.role", '"user", "assistant", "system" or "developer"', role)
        content = expect(item.get("content"), list, f"{where}.content", "a string or an array")
        parts = [self._part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        if role == "assistant":
            self._begin_turn("content")["content"] = parts
        else:
            self._open = None
            self.messages.append({"role": role, "content": parts})
        self.places[len(self.messages) - 1] = f"{where}.content"

    def _add_tool_call(
        self, item: Json, where: str, kind: str = "function", field: str = "arguments"
    ) -> None:
        """Add a call of a tool that has a name. Its input is in `field`."""
        called = {"name": _tool_name(item, where), field: expect_text(item, field, where)}
        self._add_call(item, where, {"type": kind, kind: called})

    def _add_call(self, item: Json, where: str, call: Json) -> None:
        message = self._begin_turn()
        call["id"] = expect_text(item, "call_id", where)
        message.setdefault("tool_calls", []).append(call)

    def _add_client_call(self, item: Json, where: str) -> None:
        """Add a call of a tool that OpenAI defines, unless OpenAI's servers ran it."""
        tool = CALLS[item["type"]]
        if item.get("call_id") is None and tool.kind == TOOL_SEARCH:
            return
        function = {"name": tool.kind, "arguments": tool.write_call(item, where)}
        self._add_call(item, where, {"type": "function", "function": function})

    def _add_mcp_call(self, item: Json, where: str, output: str) -> None:
        """Add a call that this server has run, and its output."""
        fields = item | {"call_id": item["id"], "namespace": item.get("server_label")}
        self._add_tool_call(fields, where)
        self._add_output({"call_id": item["id"]}, where, output)

    def _add_refusal(self, item: Json, where: str) -> None:
        """Add the call that the client did not approve. One that it approved has an item of its own."""
        request = self._approvals.get(expect_text(item, "approval_request_id", where))
        if request is None:
            wanted = "the id of an mcp_approval_request in the input"
            raise wrong(f"{where}.approval_request_id", wanted, item["approval_request_id"])
        if item.get("approve") is not True:
            reason = item.get("reason")
            text = "The user did not approve this call."
            self._add_mcp_call(request, where, f"{text} {reason}" if reason else text)

    def _add_output(self, item: Json, where: str, content: str | list[Json]) -> None:
        self._open = None
        message: Json = {"role": "tool", "content": content}
        message["tool_call_id"] = expect_text(item, "call_id", where)
        if isinstance(item.get("name"), str):
            message["name"] = item["name"]
        self.messages.append(message)
        self.places[len(self.messages) - 1] = f"{where}.output"

    def _begin_turn(self, *missing: str) -> Json:
        """Return the open message of the model if it has none of these fields yet, otherwise a new message."""
        message = self._open
        if message is None or any(message.get(name) is not None for name in missing):
            message = self._open = {"role": "assistant", "content": None}
            self.messages.append(message)
        return message

    def _output_of(self, item: Json, where: str) -> str | list[Json]:
        output = item.get("output")
        if isinstance(output, str):
            return output
        parts = expect(output, list, f"{where}.output", "a string or an array")
        return [self._part(part, f"{where}.output[{i}]") for i, part in enumerate(parts)]

    def _part(self, part: Any, where: str) -> Json:
        """Return a content part in the format of chat completions."""
        kind = expect(part, dict, where, "an object").get("type")
        if (file := self._files.get(file_id_of(part))) is not None:
            part = _with_content(part, file)
        match kind:
            case "input_text" | "output_text" | "text":
                return {"type": "text", "text": expect_text(part, "text", where)}
            case "refusal":
                return {"type": "text", "text": expect_text(part, "refusal", where)}
            case "input_image":
                limits = {name: part[name] for name in LIMITS_OF_PARTS if name in part}
                return _image(expect_text(part, "image_url", where), part.get("detail")) | limits
            case "input_video" | "video_url":
                as_in_chat: Json = part
                return as_in_chat
            case "input_file":
                return translate_file(part, where)
            case "input_audio":
                audio = expect(part.get("input_audio"), dict, f"{where}.input_audio", "an object")
                return {"type": "input_audio", "input_audio": audio}
            case _:
                raise wrong(f"{where}.type", _PART_TYPES, kind)


def _reasoning_of(item: Json, where: str) -> str:
    """Return the text of a reasoning item: its content, its decoded `encrypted_content`, or its summary."""
    if parts := item.get("content"):
        return _join_texts(parts, f"{where}.content")
    encoded = item.get("encrypted_content")
    if isinstance(encoded, str) and encoded.startswith(ENCODED_TEXT):
        return _decode_text(encoded, where)
    return _join_texts(item.get("summary") or [], f"{where}.summary")


def _decode_text(encoded: str, where: str) -> str:
    try:
        if encoded.startswith(ENCODED_TEXT):
            return base64.urlsafe_b64decode(encoded.removeprefix(ENCODED_TEXT)).decode()
    except (binascii.Error, ValueError):
        pass
    place = f"{where}.encrypted_content"
    raise bad_request(place, "was not written by this server; leave the item out")


def _agent_message(item: Json, where: str) -> str:
    """Return the text of a message between agents of Codex, after a line that names them; "" if it has no text."""
    parts = expect(item.get("content"), list, f"{where}.content", "an array")
    texts = []
    for i, part in enumerate(parts):
        place = f"{where}.content[{i}]"
        if expect(part, dict, place, "an object").get("type") != "encrypted_content":
            texts.append(expect_text(part, "text", place))
            continue
        text = expect_text(part, "encrypted_content", place)
        if text.startswith(ENCODED_TEXT):
            text = _decode_text(text, place)
        elif not any(character.isspace() for character in text):
            text = "[encrypted text]"
        texts.append(text)
    if not texts:
        return ""
    names = (item.get(name) for name in ("author", "recipient"))
    author, recipient = (name if isinstance(name, str) else "unknown" for name in names)
    return f"[agent message from {author} to {recipient}]\n" + "\n".join(texts)


def _join_texts(parts: Any, where: str) -> str:
    parts = expect(parts, list, where, "an array")
    texts = []
    for i, part in enumerate(parts):
        place = f"{where}[{i}]"
        texts.append(expect_text(expect(part, dict, place, "an object"), "text", place))
    return "\n\n".join(texts)


def _tool_name(item: Json, where: str) -> str:
    """Return the name that the model uses for the tool of a call item."""
    namespace = item.get("namespace")
    name = expect_text(item, "name", where)
    return full_name(namespace, name) if isinstance(namespace, str) else name


def _image(url: str, detail: Any = None) -> Json:
    image: Json = {"url": url}
    if isinstance(detail, str):
        image["detail"] = detail
    return {"type": "image_url", "image_url": image}
