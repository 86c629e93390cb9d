"""Tools that OpenAI defines and the client runs: a tool search, shells and patches.

The model sees each as a function. A call of it is an item of its own type, with the arguments in one field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ...http.errors import expect, wrong
from ..logprobs import Json

TOOL_SEARCH: Final = "tool_search"
"""A tool that finds other tools. Its output loads the tools that it found."""

_STRING: Final = {"type": "string"}
_STRINGS: Final = {"type": "array", "items": _STRING}
_INTEGER: Final = {"type": "integer"}


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool of one type.

    Attributes:
        kind: The type of the tool, which is also the name of the function.
        about: The description that the model reads.
        parameters: The parameters that the model reads.
        field: The field of a call item with the arguments.
        defaults: Fields of `field` that a model may leave out, and fields that it does not know.
        fields: Further fields of a call item.
        fits: Returns whether arguments are complete.
    """

    kind: str
    about: str
    parameters: Json
    field: str
    defaults: Json
    fields: Json
    fits: Callable[[Json], bool]

    @property
    def item(self) -> str:
        """The type of a call item."""
        return f"{self.kind}_call"

    def read_call(self, text: str) -> Json | None:
        """Return the fields of a call item for the arguments that the model wrote; None if they do not fit."""
        try:
            arguments = msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            arguments = {}
        if not self.fits(arguments):
            return None
        # The fields of the model come first, so that the next prompt repeats them in its order.
        missing = {k: v for k, v in self.defaults.items() if k not in arguments}
        return {**self.fields, self.field: arguments | missing}

    def write_call(self, item: Json, where: str) -> str:
        """Return the arguments in a call item, as the model wrote them."""
        given = item.get(self.field)
        if isinstance(given, str):
            return given
        fields = expect(given or {}, dict, f"{where}.{self.field}", "an object")
        shown = {k: v for k, v in fields.items() if k not in self.defaults or v != self.defaults[k]}
        return msgspec.json.encode(shown).decode()


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _is_operation(arguments: Json) -> bool:
    kind = arguments.get("type")
    has_diff = kind == "delete_file" or _is_text(arguments.get("diff"))
    kinds = ("create_file", "update_file", "delete_file")
    return kind in kinds and has_diff and _is_text(arguments.get("path"))


CLIENT_TOOLS: Final[Mapping[str, ClientTool]] = {
    tool.kind: tool
    for tool in (
        ClientTool(
            kind=TOOL_SEARCH,
            about="Find tools.",
            parameters={"type": "object"},
            field="arguments",
            defaults={},
            fields={"execution": "client"},
            fits=lambda arguments: True,
        ),
        ClientTool(
            kind="local_shell",
            about="Run a command on the computer of the user.",
            parameters={
                "type": "object",
                "properties": {
                    "command": _STRINGS | {"description": "The program and its arguments."},
                    "working_directory": _STRING,
                    "timeout_ms": _INTEGER,
                },
                "required": ["command"],
            },
            field="action",
            defaults={
                "type": "exec",
                "env": {},
                "timeout_ms": None,
                "user": None,
                "working_directory": None,
            },
            fields={},
            fits=lambda arguments: _are_texts(arguments.get("command")),
        ),
        ClientTool(
            kind="shell",
            about="Run shell commands. The output has what each wrote, and its exit code.",
            parameters={
                "type": "object",
                "properties": {
                    "commands": _STRINGS | {"description": "The commands, which run in order."},
                    "timeout_ms": _INTEGER,
                    "max_output_length": _INTEGER,
                },
                "required": ["commands"],
            },
            field="action",
            defaults={"timeout_ms": None, "max_output_length": None},
            fields={"environment": {"type": "local"}},
            fits=lambda arguments: _are_texts(arguments.get("commands")),
        ),
        ClientTool(
            kind="apply_patch",
            about="Create, update or delete a file. The diff of a new file has all of its lines, "
            "each after +. The diff of an update has sections: @@ with a line that finds the place, "
            "then lines after a space (unchanged), - (removed) or + (added).",
            parameters={
                "type": "object",
                "properties": {
                    "type": {"enum": ["create_file", "update_file", "delete_file"]},
                    "path": _STRING,
                    "diff": _STRING,
                },
                "required": ["type", "path"],
            },
            field="operation",
            defaults={},
            fields={},
            fits=_is_operation,
        ),
    )
}
"""Type of a tool -> the tool."""

CALLS: Final[Mapping[str, ClientTool]] = {tool.item: tool for tool in CLIENT_TOOLS.values()}
"""Type of a call item -> its tool."""


def is_client_tool(tool: Json) -> bool:
    """Return whether a tool of a request is one of the `CLIENT_TOOLS`."""
    kind = tool.get("type")
    if kind == TOOL_SEARCH:
        return bool(tool.get("execution") == "client")
    return isinstance(kind, str) and kind in CLIENT_TOOLS


def as_function(tool: Json, where: str) -> Json:
    """Return a client tool as a function. Raise APIError 400 if a shell runs in a container of OpenAI."""
    known = CLIENT_TOOLS[tool["type"]]
    about, parameters = known.about, known.parameters
    if known.kind == TOOL_SEARCH:
        about, parameters = tool.get("description") or about, tool.get("parameters") or parameters
    environment = tool.get("environment")
    if environment is not None:
        place = f"{where}.environment"
        kind = expect(environment, dict, place, "an object").get("type")
        if kind != "local":
            expected = '"local", because this server runs no tools itself'
            raise wrong(f"{place}.type", expected, kind)
    function = {"name": known.kind, "description": about, "parameters": parameters}
    return {"type": "function", "function": function}


OUTPUTS: Final = tuple(f"{item}_output" for item in CALLS if item != f"{TOOL_SEARCH}_call")
"""Types of items with the output of a call. That of a tool search has another type."""


def write_output(item: Json, where: str) -> tuple[str, str]:
    """Return the identifier of the call that an output item answers, and the output as the model reads it.

    Raises:
        APIError: A field is invalid (400).
    """
    # OpenAI's schema of local_shell_call_output has the identifier of the call in `id`.
    call_id = item.get("call_id") or item.get("id")
    output = item.get("output")
    if item["type"] == "apply_patch_call_output":
        status = item.get("status")
        if status not in ("completed", "failed"):
            raise wrong(f"{where}.status", '"completed" or "failed"', status)
        text = f"{status}: {output}" if output else status
    elif isinstance(output, str):
        text = output
    else:
        parts = expect(output, list, f"{where}.output", "a string or an array")
        text = msgspec.json.encode(parts).decode()
    return expect(call_id, str, f"{where}.call_id", "a string"), text
