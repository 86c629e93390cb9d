"""Builds the output items of a response, and the events that announce them, from the pieces of a message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...chat import MessageDelta, ToolCallDelta
from ..logprobs import Json
from .client_tools import CALLS
from .ids import item_id
from .items import encode_text

Emit = Callable[..., None]
"""Function that writes an event, from its type and its fields."""


class OutputBuilder:
    """The output of one response.

    Items are written one after another, with events for the start of the item, its parts, their text and its end.

    Args:
        response_id: The identifier of the response.
        emit: Writes the events.
        name_call: Returns the fields that name the tool of a call.
        kind_of: Returns the type of the item for a call, from its first piece.
        summarizes: True if reasoning is a summary instead of content.
        encrypts: True if items of reasoning have `encrypted_content`.
    """

    def __init__(
        self,
        response_id: str,
        emit: Emit,
        *,
        name_call: Callable[[ToolCallDelta], Json],
        kind_of: Callable[[ToolCallDelta], str],
        summarizes: bool = False,
        encrypts: bool = False,
    ) -> None:
        self.items: list[Json] = []
        self._response_id = response_id
        self._emit = emit
        self._name_call = name_call
        self._kind_of = kind_of
        self._kinds: dict[int, str] = {}
        self._summarizes = summarizes
        self._encrypts = encrypts
        # The call whose item is added when its arguments are complete; None if there is none.
        self._held: ToolCallDelta | None = None
        # The open item and its call; None if no item is open.
        self._open: Json | None = None
        self._call = -1
        self._pieces: list[str] = []
        self._logprobs: list[Json] = []
        self._unplaced: list[Json] = []

    def add(self, message: MessageDelta, logprobs: list[Json]) -> None:
        """Add a piece of the message, with the logprobs of the tokens that came with it.

        A parser may hold text back, so logprobs are kept until their text arrives. Logprobs of reasoning and calls are
        dropped.
        """
        self._unplaced += logprobs
        if message.reasoning:
            self._enter("reasoning")
            self._add_reasoning(message.reasoning)
        if message.content:
            self._enter("message")
            self._add_text(message.content)
        for call in message.tool_calls:
            if call.index not in self._kinds:
                self._kinds[call.index] = self._kind_of(call)
            self._enter(self._kinds[call.index], call)
            self._add_arguments(call.arguments)
        if message.reasoning or message.tool_calls:
            self._unplaced = []

    def add_item(self, item: Json) -> None:
        """Add a complete item."""
        self.close()
        self.items.append(item)
        for kind in ("added", "done"):
            where = {"output_index": len(self.items) - 1}
            self._emit(f"response.output_item.{kind}", **where, item=item)

    def close(self, *, is_cut: bool = False) -> None:
        """Close the open item. It is incomplete if the answer was cut off."""
        if self._held is not None:
            self._release()
        item = self._open
        if item is None:
            return
        text = "".join(self._pieces)
        self._open, self._pieces = None, []
        place = self._place(item)
        match item["type"]:
            case "message":
                self._close_text(item, text, place)
            case "reasoning":
                self._close_reasoning(item, text, place)
            case kind:
                name = "arguments" if kind == "function_call" else "input"
                item[name] = text
                self._emit(f"response.{_argument_events(item)}.done", **place, **{name: text})
        item["status"] = "incomplete" if is_cut else "completed"
        self._emit("response.output_item.done", output_index=place["output_index"], item=item)

    def _enter(self, kind: str, call: ToolCallDelta | None = None) -> None:
        """Begin an item of this kind, unless it is already open."""
        number = -1 if call is None else call.index
        held = None if self._held is None else self._held.index
        if held == number:
            return
        if self._open is not None and self._open["type"] == kind and self._call == number:
            return
        self.close()
        if kind in CALLS:
            self._held = call
            return
        self._begin(kind, call)
        self._call = number

    def _begin(self, kind: str, call: ToolCallDelta | None, **fields: Any) -> None:
        identifier = item_id(kind, self._response_id, 0x1000 + len(self.items))
        item: Json = {"id": identifier, "type": kind, "status": "in_progress"}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": []}
            if not self._summarizes:
                item["content"] = []
        elif fields:
            assert call is not None
            item |= {"call_id": call.id, **fields}
        else:
            assert call is not None
            name = "arguments" if kind == "function_call" else "input"
            item |= {"call_id": call.id, **self._name_call(call), name: ""}
        self._open = item
        self.items.append(item)
        place = self._place(item)
        self._emit("response.output_item.added", output_index=place["output_index"], item=item)
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._emit("response.content_part.added", **place, content_index=0, part=part)
        elif kind == "reasoning" and self._summarizes:
            part = {"type": "summary_text", "text": ""}
            self._emit("response.reasoning_summary_part.added", **place, summary_index=0, part=part)
        elif kind == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            self._emit("response.content_part.added", **place, content_index=0, part=part)

    def _release(self) -> None:
        """Add the call that was held back until its arguments were complete.

        If they do not fit, because they were cut off or the model wrote others, the call is one of a function.
        """
        call, text = self._held, "".join(self._pieces)
        assert call is not None
        self._held, self._pieces = None, []
        kind = self._kinds[call.index]
        fields = CALLS[kind].read_call(text)
        if fields is None:
            self._begin("function_call", call)
            self._add_arguments(text)
            return
        self._begin(kind, call, **fields)
        item, self._open = self._open, None
        assert item is not None
        place = len(self.items) - 1
        commands = fields.get("action", {}).get("commands", ())
        for i, command in enumerate(commands):
            where = {"output_index": place, "command_index": i}
            self._emit("response.shell_call_command.added", **where, command="")
            self._emit("response.shell_call_command.delta", **where, delta=command)
            self._emit("response.shell_call_command.done", **where, command=command)
        item["status"] = "completed"
        self._emit("response.output_item.done", output_index=place, item=item)

    def _place(self, item: Json) -> Json:
        return {"item_id": item["id"], "output_index": len(self.items) - 1}

    def _add_text(self, text: str) -> None:
        assert self._open is not None
        self._pieces.append(text)
        logprobs, self._unplaced = _place_logprobs(text, self._unplaced)
        self._logprobs += logprobs
        self._emit(
            "response.output_text.delta",
            **self._place(self._open),
            content_index=0,
            delta=text,
            logprobs=logprobs,
        )

    def _add_reasoning(self, text: str) -> None:
        assert self._open is not None
        self._pieces.append(text)
        place = self._place(self._open)
        if self._summarizes:
            self._emit(
                "response.reasoning_summary_text.delta", **place, summary_index=0, delta=text
            )
        else:
            self._emit("response.reasoning_text.delta", **place, content_index=0, delta=text)

    def _add_arguments(self, text: str) -> None:
        if not text:
            return
        self._pieces.append(text)
        if self._open is not None:
            place = self._place(self._open)
            self._emit(f"response.{_argument_events(self._open)}.delta", **place, delta=text)

    def _close_text(self, item: Json, text: str, place: Json) -> None:
        logprobs, self._logprobs = self._logprobs, []
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        item["content"] = [part]
        self._emit(
            "response.output_text.done", **place, content_index=0, text=text, logprobs=logprobs
        )
        self._emit("response.content_part.done", **place, content_index=0, part=part)

    def _close_reasoning(self, item: Json, text: str, place: Json) -> None:
        if self._encrypts:
            item["encrypted_content"] = encode_text(text)
        if self._summarizes:
            part = {"type": "summary_text", "text": text}
            item["summary"] = [part]
            events, where = "reasoning_summary", {"summary_index": 0}
            self._emit(f"response.{events}_text.done", **place, **where, text=text)
            self._emit(f"response.{events}_part.done", **place, **where, part=part)
            return
        part = {"type": "reasoning_text", "text": text}
        item["content"] = [part]
        self._emit("response.reasoning_text.done", **place, content_index=0, text=text)
        self._emit("response.content_part.done", **place, content_index=0, part=part)


def _argument_events(item: Json) -> str:
    if item["type"] == "function_call":
        return "function_call_arguments"
    return "custom_tool_call_input"


def _place_logprobs(text: str, entries: list[Json]) -> tuple[list[Json], list[Json]]:
    """Split logprobs into those of the tokens of `text`, and those of later tokens.

    Each entry has the bytes of its token. Tokens before the text are dropped, because they are not shown.
    """
    written = text.encode()
    start = b"".join(bytes(entry["bytes"]) for entry in entries).rfind(written)
    if start < 0:
        return entries, []
    end = start + len(written)
    position = 0
    placed: list[Json] = []
    later: list[Json] = []
    for entry in entries:
        begin, position = position, position + len(entry["bytes"])
        if begin >= end:
            later.append(entry)
        elif position > start:
            placed.append(entry)
    return placed, later
