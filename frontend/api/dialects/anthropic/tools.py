"""Tools that Anthropic defines and the client runs: their names and parameters, which requests leave out.

Models of Anthropic were trained on them. Other models read the descriptions and the JSON schemas of this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ....http.errors import expect, wrong
from ...logprobs import Json

_POINT: Final = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_TEXT: Final = {"type": "string"}
_RANGE: Final = _POINT | {"description": "First and last line to show; -1 is the end of the file."}

_BASH: Final = (
    "bash",
    "Run commands in a bash session that lasts for the whole conversation.",
    {
        "command": _TEXT | {"description": "The command to run."},
        "restart": {"type": "boolean", "description": "true to restart the session instead."},
    },
    (),
)

_EDITS: Final = {
    "path": _TEXT | {"description": "Path of the file or directory."},
    "file_text": _TEXT | {"description": "Content of the file, for create."},
    "old_str": _TEXT | {"description": "Text to replace, which must occur once, for str_replace."},
    "new_str": _TEXT | {"description": "The new text, for str_replace."},
    "insert_line": {"type": "integer", "description": "Line to insert after; 0 is the start."},
    "insert_text": _TEXT | {"description": "Text to insert, for insert."},
    "view_range": _RANGE,
}

_EDITOR_COMMANDS: Final = ("view", "create", "str_replace", "insert")
_MEMORY_COMMANDS: Final = (*_EDITOR_COMMANDS, "delete", "rename")

_FIRST_ACTIONS: Final = (
    "key",
    "type",
    "mouse_move",
    "left_click",
    "left_click_drag",
    "right_click",
    "middle_click",
    "double_click",
    "screenshot",
    "cursor_position",
)
_LATER_ACTIONS: Final = (
    *_FIRST_ACTIONS,
    "left_mouse_down",
    "left_mouse_up",
    "scroll",
    "hold_key",
    "wait",
    "triple_click",
)

_COMPUTER: Final = {
    "text": _TEXT | {"description": "Text to type, or keys such as ctrl+s."},
    "coordinate": _POINT | {"description": "The point [x, y] in pixels."},
    "start_coordinate": _POINT | {"description": "The point where a drag starts."},
    "scroll_direction": {"enum": ["up", "down", "left", "right"]},
    "scroll_amount": {"type": "integer", "description": "Number of clicks of the wheel."},
    "duration": {"type": "number", "description": "Seconds, for hold_key and wait."},
}
_REGION: Final = _POINT | {
    "minItems": 4,
    "maxItems": 4,
    "description": "The region [x0, y0, x1, y1] to enlarge, for zoom.",
}


def _commands(field: str, names: tuple[str, ...], parameters: Mapping[str, Any]) -> Json:
    return {field: {"type": "string", "enum": [*names]}, **parameters}


def _edit(name: str, *more: str) -> tuple[str, str, Json, tuple[str, ...]]:
    parameters = _commands("command", (*_EDITOR_COMMANDS, *more), _EDITS)
    return name, "View, create and edit files.", parameters, ("command", "path")


def _computer(*actions: str) -> tuple[str, str, Json, tuple[str, ...]]:
    about = "Use the mouse and the keyboard of a computer, and take screenshots."
    return "computer", about, _commands("action", actions, _COMPUTER), ("action",)


_MEMORY: Final = (
    "memory",
    "View, create and change files below /memories, which last beyond this conversation.",
    _commands("command", _MEMORY_COMMANDS, _EDITS | {"old_path": _TEXT, "new_path": _TEXT}),
    ("command",),
)

CLIENT_TOOLS: Final[Mapping[str, tuple[str, str, Json, tuple[str, ...]]]] = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _edit("str_replace_editor", "undo_edit"),
    "text_editor_20250124": _edit("str_replace_editor", "undo_edit"),
    "text_editor_20250429": _edit("str_replace_based_edit_tool"),
    "text_editor_20250728": _edit("str_replace_based_edit_tool"),
    "computer_20241022": _computer(*_FIRST_ACTIONS),
    "computer_20250124": _computer(*_LATER_ACTIONS),
    "computer_20251124": _computer(*_LATER_ACTIONS),
    "memory_20250818": _MEMORY,
}
"""Type of a tool -> its name, its description, its parameters and those of them that every call has."""


def client_tool(tool: Json, where: str) -> Json:
    """Return a tool of one of the `CLIENT_TOOLS` as a function.

    Raises:
        APIError: It has another name, or a display without a size (400).
    """
    name, about, parameters, required = CLIENT_TOOLS[tool["type"]]
    if tool.get("name", name) != name:
        raise wrong(f"{where}.name", f'"{name}"', tool.get("name"))
    if name == "computer":
        width, height = (
            expect(tool.get(field), int, f"{where}.{field}", "an integer")
            for field in ("display_width_px", "display_height_px")
        )
        about = f"{about} The screen has {width} x {height} pixels."
        if tool.get("enable_zoom"):
            actions = parameters["action"]
            zooms = actions | {"enum": [*actions["enum"], "zoom"]}
            parameters = parameters | {"action": zooms, "region": _REGION}
    schema: Json = {"type": "object", "properties": parameters, "required": [*required]}
    function: Json = {"name": name, "description": about, "parameters": schema}
    return {"type": "function", "function": function}
