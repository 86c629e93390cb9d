"""Imported at the start where the directory is on PYTHONPATH: a frontend writes down the pauses of its event loop.

`LOOP_PAUSES_FILE` names the file. Each line is a JSON object with the end of a pause on CLOCK_MONOTONIC, its length,
the processor time of the loop's thread and the time of garbage collections meanwhile (all in seconds), and with
`LOOP_PAUSES_STACKS` the innermost frames of all threads.
"""

import asyncio
import gc
import json
import os
import sys
import threading
import time
import traceback
from collections import Counter

import uvloop

TICK_S = 0.001
SHORTEST_S = 0.004
NUM_FRAMES = 8
NUM_STACKS = 4
IDLE = ("wait", "_worker", "_watch", "_catch_stacks", "wait_for_end_of_file")

_new_event_loop = uvloop.new_event_loop


def new_event_loop() -> uvloop.Loop:
    """Return a loop that watches itself."""
    loop = _new_event_loop()
    loop.call_soon(LoopGauge, loop, os.environ["LOOP_PAUSES_FILE"])
    return loop


class LoopGauge:
    """Wakes up every millisecond and writes down when it could not."""

    def __init__(self, loop: asyncio.AbstractEventLoop, path: str) -> None:
        self._loop = loop
        self._file = open(path, "a", buffering=1)  # noqa: SIM115
        self._thread = threading.get_ident()
        self._ticked_at, self._cpu_s = time.monotonic(), time.thread_time()
        self._stacks: Counter[str] = Counter()
        self._gc_s = self._collection_began = 0.0
        gc.callbacks.append(self._time_collection)
        if os.environ.get("LOOP_PAUSES_STACKS"):
            threading.Thread(target=self._catch_stacks, daemon=True).start()
        loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        now, cpu_s = time.monotonic(), time.thread_time()
        pause_s = now - self._ticked_at - TICK_S
        if pause_s >= SHORTEST_S:
            pause = {
                "end": now,
                "pause_s": pause_s,
                "cpu_s": cpu_s - self._cpu_s,
                "gc_s": self._gc_s,
            }
            self._file.write(
                json.dumps(pause | {"stacks": self._stacks.most_common(NUM_STACKS)}) + "\n"
            )
        self._ticked_at, self._cpu_s, self._gc_s = now, cpu_s, 0.0
        self._stacks.clear()
        self._loop.call_later(TICK_S, self._tick)

    def _time_collection(self, phase: str, _: dict[str, int]) -> None:
        # A collection in any thread blocks all others.
        if phase == "start":
            self._collection_began = time.monotonic()
        else:
            self._gc_s += time.monotonic() - self._collection_began

    def _catch_stacks(self) -> None:
        while True:
            time.sleep(SHORTEST_S / 4)
            if time.monotonic() - self._ticked_at > SHORTEST_S:
                for thread, top in sys._current_frames().items():
                    if thread == self._thread or top.f_code.co_name not in IDLE:
                        frames = traceback.extract_stack(top)[-NUM_FRAMES:]
                        self._stacks[" > ".join(f"{f.name}:{f.lineno}" for f in frames)] += 1


uvloop.new_event_loop = new_event_loop
