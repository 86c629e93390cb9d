"""Send the events of stored and running responses to clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from ...chat import MessageDelta, ToolCallDelta
from ...http.routing import Asgi
from ..bodies.disconnection import while_connected
from ..logprobs import Json
from ..streaming.text_events import TextEvents
from .answer import RESPONSE_STREAM, EventWriter
from .background import EVENT_END, BackgroundRun
from .client_tools import CALLS
from .mcp.tools import SEPARATE
from .output import OutputBuilder
from .states import ENDED, ResponseStates

WAIT_S: Final = 60.0
"""Seconds after which a reader checks a run, even if nothing has woken it."""

POLL_S: Final = 0.1
"""Seconds between checks for new events of a run in another frontend."""


async def send_events(events: AsyncIterator[bytes], asgi: Asgi) -> None:
    """Send events as a stream until they end.

    Raises:
        APIError: The events cannot be read, and none was sent.
        ClientDisconnected: The client closed the connection first.
    """

    async def write() -> None:
        async with TextEvents(asgi, form=RESPONSE_STREAM) as stream:
            async for data in events:
                await stream.write_encoded(data)

    await while_connected(asgi.receive, write())


async def read_run(run: BackgroundRun, first: int) -> AsyncIterator[bytes]:
    """Yield the events of a run in this frontend, from number `first` on."""
    position = first
    while True:
        is_done = run.is_done
        if position < run.num_readable_events:
            events = run.events[position : run.num_readable_events]
            position += len(events)
            yield b"".join(events)
        elif is_done:
            return
        else:
            await run.wait(WAIT_S)


async def read_stored(
    states: ResponseStates, identifier: str, owner: str, first: int
) -> AsyncIterator[bytes]:
    """Yield the stored events of a response from number `first` on, while another frontend writes them.

    Raises:
        APIError: The response was deleted meanwhile (404), or the store does not answer (503).
    """
    after, position, last = "", 0, b""
    while True:
        record = await states.responses.get(identifier, owner)
        parts, after = await states.events.read_parts(identifier, owner, after)
        for part in parts:
            events = [each + EVENT_END for each in part.split(EVENT_END) if each]
            last = events[-1]
            skipped = max(0, min(first - position, len(events)))
            position += len(events)
            if skipped < len(events):
                yield b"".join(events[skipped:])
        response = record["response"]
        if response["status"] in ENDED and not parts:
            ending = f"response.{response['status']}"
            if response["status"] == "failed" and not last.startswith(f"event: {ending}".encode()):
                # The run was lost before it could store its last events, some of which the client may have read.
                writer = EventWriter(max(position, first))
                writer.emit(ending, response=response)
                yield writer.take()
            return
        await asyncio.sleep(POLL_S)


async def repeat_events(response: Json, first: int) -> AsyncIterator[bytes]:
    """Yield the events of a finished response from number `first` on, with each text in one piece."""
    writer = EventWriter()
    running = response | {
        "status": "in_progress",
        "output": [],
        "usage": None,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
    }
    writer.emit("response.created", response=running)
    writer.emit("response.in_progress", response=running)
    items = response["output"]
    kinds = [item["type"] for item in items]
    builder = OutputBuilder(
        response["id"],
        writer.emit,
        name_call=lambda call: _name_of(items[call.index]),
        kind_of=lambda call: str(kinds[call.index]),
        summarizes=any(item.get("summary") for item in items),
        encrypts=any(item.get("encrypted_content") for item in items),
    )
    for i, item in enumerate(items):
        match item["type"]:
            case "reasoning":
                [part] = item.get("content") or item["summary"]
                builder.add(MessageDelta(reasoning=part["text"]), [])
            case "message":
                [part] = item["content"]
                builder.add(MessageDelta(content=part["text"]), part["logprobs"])
            case kind if kind in SEPARATE:
                builder.add_item(item)
            case kind:
                if (tool := CALLS.get(kind)) is not None:
                    arguments = tool.write_call(item, "output")
                else:
                    arguments = item["input" if kind == "custom_tool_call" else "arguments"]
                call = ToolCallDelta(i, item["call_id"], item.get("name"), arguments)
                builder.add(MessageDelta(tool_calls=[call]), [])
    builder.close(is_cut=response["status"] != "completed")
    writer.emit(f"response.{response['status']}", response=response)
    events = [each + EVENT_END for each in writer.take().split(EVENT_END) if each]
    if first < len(events):
        yield b"".join(events[first:])


def _name_of(item: Json) -> Json:
    """Return the fields of a call that name its tool."""
    return {name: item[name] for name in ("name", "namespace") if name in item}
