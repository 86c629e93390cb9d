"""A client in its own process that reads streams all the time and reports their longest pause.

`python stream_monitor.py HOST PORT PID` reads commands from standard input, one a line, and answers each with a line of
JSON: `begin` starts an interval; `end` waits for one more event of every stream and reports the interval.

Time in which the children of the process PID, the server, could not run because the machine was busy does not count.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.processes.lost_time import lost_time_s
from support.processes.program import descendants

NUM_STREAMS: Final = 3
MAX_TOKENS: Final = 100
POLL_S: Final = 0.02
LOST_TIME_S: Final = 0.1
"""Time between two looks at the lost time. Each costs about a millisecond."""
LONG_PAUSE_S: Final = 0.3
"""Pauses that last longer are corrected for lost time."""
NEXT_EVENT_S: Final = 30.0


class StreamMonitor:
    def __init__(self, host: str, port: int, pid: int) -> None:
        self._address = host, port
        self._server_pid = pid
        self._pids: list[int] = []
        self._lost_s = 0.0
        """The lost time at the last tick of the timer."""
        self._lost_at_event_s = [0.0] * NUM_STREAMS
        self._last_event = [time.monotonic()] * NUM_STREAMS
        self._num_events = [0] * NUM_STREAMS
        self._texts: dict[int, str] = {}
        self._pause_s = 0.0
        self._broken: list[str] = []

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        commands = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        streams = [asyncio.create_task(self._read_streams(number)) for number in range(NUM_STREAMS)]
        timer = asyncio.create_task(self._run_timer())
        while command := (await commands.readline()).decode().strip():
            if command == "begin":
                self._begin()
                print("{}", flush=True)
            else:
                print(json.dumps(await self._end()), flush=True)
        for task in (*streams, timer):
            task.cancel()

    def _begin(self) -> None:
        self._pids = [child.pid for child in descendants(self._server_pid)]
        self._lost_s = lost_time_s(self._pids)
        self._lost_at_event_s = [self._lost_s] * NUM_STREAMS
        self._last_event = [time.monotonic()] * NUM_STREAMS
        self._num_events = [0] * NUM_STREAMS
        self._pause_s = 0.0
        self._broken = []

    async def _end(self) -> dict[str, object]:
        counts = list(self._num_events)
        deadline = time.monotonic() + NEXT_EVENT_S
        while time.monotonic() < deadline and any(
            after <= before for after, before in zip(self._num_events, counts, strict=True)
        ):
            await asyncio.sleep(POLL_S)
        for number in range(NUM_STREAMS):
            self._end_pause(number)
        return {
            "pause_s": self._pause_s,
            "num_events": sum(self._num_events),
            "broken": self._broken,
        }

    async def _run_timer(self) -> None:
        while True:
            await asyncio.sleep(LOST_TIME_S)
            self._lost_s = lost_time_s(self._pids)

    async def _read_streams(self, number: int) -> None:
        while True:
            try:
                text = await self._read_stream(number)
                if text != self._texts.setdefault(number, text):
                    self._broken.append(f"stream {number} got other tokens")
            except (OSError, EOFError, ValueError) as error:
                self._broken.append(f"stream {number}: {error!r}")
                await asyncio.sleep(0.1)

    async def _read_stream(self, number: int) -> str:
        """Return the text of one whole stream."""
        reader, writer = await asyncio.open_connection(*self._address)
        body = json.dumps(
            {
                "prompt": [number + 10],
                "seed": number,
                "max_tokens": MAX_TOKENS,
                "ignore_eos": True,
                "stream": True,
            }
        )
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        parts = []
        try:
            writer.write((head + body).encode())
            status = await reader.readline()
            if b" 200 " not in status:
                raise ValueError(f"status {status!r}, {await reader.read(2000)!r}")
            while line := await reader.readline():
                if not line.startswith(b"data: "):
                    continue
                self._count_event(number)
                if line.startswith(b"data: [DONE]"):
                    return "".join(parts)
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(str(event["error"]))
                parts += [choice["text"] for choice in event["choices"]]
        finally:
            writer.close()
        raise EOFError("the stream ended without [DONE]")

    def _count_event(self, number: int) -> None:
        self._end_pause(number)
        self._last_event[number] = time.monotonic()
        self._lost_at_event_s[number] = self._lost_s
        self._num_events[number] += 1

    def _end_pause(self, number: int) -> None:
        pause_s = time.monotonic() - self._last_event[number]
        if pause_s > LONG_PAUSE_S:
            pause_s -= lost_time_s(self._pids) - self._lost_at_event_s[number]
        self._pause_s = max(self._pause_s, pause_s)


if __name__ == "__main__":
    asyncio.run(StreamMonitor(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])).run())
