"""Identifiers of responses, conversations and items.

An item's identifier contains the identifier of the response or conversation that it was created in. So a reference to
an item can be resolved without an index.
"""

from __future__ import annotations

import re
import uuid
from typing import Final

_ITEM: Final = re.compile(r"[a-z]{2,8}_([0-9a-f]{32})(c?)[0-9a-f]+")

RESPONSE: Final = "resp"
"""The prefix of the identifiers of responses."""

ITEM_PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "compaction": "cmp",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "shell_call": "sh",
    "shell_call_output": "sho",
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
    "apply_patch_call": "apc",
    "apply_patch_call_output": "apco",
}
"""Type of an item -> the prefix of its identifier."""


def new_id(prefix: str) -> str:
    """Return a random identifier, which cannot be guessed."""
    return f"{prefix}_{uuid.uuid4().hex}"


def item_id(kind: str, owner_id: str, index: int) -> str:
    """Return the identifier of an item of a response or a conversation."""
    prefix, _, unique = owner_id.partition("_")
    mark = "c" if prefix == "conv" else ""
    return f"{ITEM_PREFIXES.get(kind, 'item')}_{unique}{mark}{index:04x}"


def owner_of_item(identifier: str) -> str | None:
    """Return the response or conversation that an item was created in; None for an identifier of another form."""
    match = _ITEM.fullmatch(identifier)
    if match is None:
        return None
    return f"{'conv' if match[2] else RESPONSE}_{match[1]}"
