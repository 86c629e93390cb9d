"""Predict the gain of drafts for edits of source code, from the text and from the measured costs of steps.

    scripts/bench/run draft_edits [--model PATH] [--costs '{"1": 7.3, "2": 8.1, "8": 12.6, "17": 22.6}']

A small model cannot edit code, so its speed with drafts says little about edits. Here, the answers are known: parts of
the standard library with an edit, after a prompt that has the part before the edit. `rename` repeats the part with a
name changed, `local` repeats it with three lines changed, added or removed, and `block` writes 14 lines before and
after their change. The lookup and the limits of drafts are those of the server, for one stream.

The costs are milliseconds of a step by its number of rows. Without `--costs`, they are measured on the model.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import re
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import numpy as np
import torch
from engine.core.scheduler.features.draft_limits import DraftLimits
from engine.core.state.slots import Slots
from engine.frontend.model_source.config import resolve_model
from engine.frontend.model_source.options import ModelOptions
from engine.frontend.supervisor.console import Console
from engine.frontend.tokenizer.load import load_tokenizer
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.config.scheduler import DEFAULT_SPECULATION
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import NewRequestData
from engine.workers.batch import PersistentBatch
from engine.workers.cpu.drafts import Drafts
from step_profile import Decoding
from support.servers.server import default_model

MODULES: Final = ("argparse", "configparser", "mailbox", "csv", "shlex", "tarfile", "ftplib")
ADDED_LINES: Final = ("if not self._closed:", "assert value is not None", "self._lock.acquire()")
MOST: Final = DEFAULT_SPECULATION.num_speculative_tokens
ROWS: Final = (1, 2, 3, 4, 5, 6, 8, 9, 12, 13, MOST, MOST + 1)
MAX_MODEL_LEN: Final = 4096

Edit = tuple[str, str]
"""The text before and after the edit, or the text and what is written about it."""


def part(rng: random.Random, count: int) -> list[str]:
    lines = inspect.getsource(import_module(rng.choice(MODULES))).splitlines()
    start = rng.randrange(len(lines) // 4, len(lines) * 3 // 4 - count)
    return lines[start : start + count]


def indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def rename(rng: random.Random) -> Edit:
    old = "\n".join(part(rng, 60))
    names = re.findall(r"\b[a-z_]{6,}\b", old)
    name = max(sorted(set(names)), key=names.count)
    return old, re.sub(rf"\b{name}\b", f"{name}_value", old)


def local(rng: random.Random) -> Edit:
    old = part(rng, 60)
    new = list(old)
    for change in ("add", "change", "remove"):
        place = rng.randrange(len(new))
        if change == "add":
            new.insert(place, indent(new[place]) + rng.choice(ADDED_LINES))
        elif change == "change":
            new[place] = new[place].replace("if ", "if not ") + "  # changed"
        else:
            del new[place]
    return "\n".join(old), "\n".join(new)


def block(rng: random.Random) -> Edit:
    lines = part(rng, 80)
    start = rng.randrange(10, 50)
    old = lines[start : start + 14]
    place = rng.randrange(3, 10)
    added = [indent(old[place]) + text for text in ("if value is None:", "    return default")]
    new = old[:place] + added + old[place + 1 :]
    blocks = ["<<<<<<< SEARCH", *old, "=======", *new, ">>>>>>> REPLACE"]
    return "\n".join(lines), "\n".join(blocks)


KINDS: Final[dict[str, Callable[[random.Random], Edit]]] = {
    "rename": rename,
    "local": local,
    "block": block,
}


def measure_costs(model: str) -> dict[int, float]:
    """Return the median milliseconds of a step of one request, by its number of rows."""
    decoding = Decoding(model, 1, 300, 2000, DEFAULT_SPECULATION)
    spent: dict[int, list[float]] = {rows: [] for rows in ROWS}
    rng = np.random.default_rng(0)
    for _ in range(16):
        for rows, times in spent.items():
            fields = {}
            if rows > 1:
                fields = {
                    "chunks": int32_bytes([0, rows]),
                    "drafts": int32_bytes([0, rows - 1]),
                    "draft_token_ids": int32_bytes(rng.integers(1000, 9000, rows - 1)),
                }
            begin = time.perf_counter()
            decoding.step(**fields)
            times.append(1e3 * (time.perf_counter() - begin))
    return {rows: statistics.median(times) for rows, times in spent.items()}


class Replay:
    """Runs known answers through lookup and limits as a server with one stream does."""

    def __init__(self, costs: dict[int, float]) -> None:
        self._rows, self._ms = list(costs), list(costs.values())
        self._batch = PersistentBatch(1, MAX_MODEL_LEN, 16, 1, torch.device("cpu"))
        self._drafts = Drafts(DEFAULT_SPECULATION, self._batch)
        self._slots = Slots(1, MAX_MODEL_LEN)
        self._limits = DraftLimits(DEFAULT_SPECULATION, self._slots)
        self.num_tokens = self.num_steps = self.num_drafts = self.num_right = 0
        self.ms = 0.0

    def cost(self, num_rows: int) -> float:
        return float(np.interp(num_rows, self._rows, self._ms))

    def run(self, prompt: list[int], answer: list[int]) -> None:
        slot = np.zeros(1, np.intp)
        tokens = np.array(prompt + answer, np.int32)
        self._slots.generation[0] += 1
        self._batch.num_prompt_tokens[0] = len(prompt)
        new = NewRequestData(0, (0, 0), b"", 0, 0, (), SamplingParams(temperature=0))
        self._drafts.add_requests([new])
        length = len(prompt) + 1
        while length < len(tokens):
            if changes := self._limits.take_changes(slot):
                self._drafts.set_limits(int32_view(changes))
            drafts = self._look_up(tokens[:length])
            following = tokens[length : length + len(drafts)]
            is_wrong = (following != drafts[: len(following)]).nonzero()[0]
            num_right = int(is_wrong[0]) if len(is_wrong) else len(following)
            ms = self.cost(1 + len(drafts))
            self._limits.record_drafts(slot, np.array([num_right]), np.array([len(drafts)]))
            self._limits.record_step(1 + len(drafts), ms / 1e3, 0.0, 0)
            num_new = min(num_right + 1, len(tokens) - length)
            length += num_new
            self.ms += ms
            self.num_tokens += num_new
            self.num_drafts += len(drafts)
            self.num_right += num_right
            self.num_steps += 1

    def _look_up(self, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> np.ndarray[Any, Any]:
        self._batch.token_ids_NL[0, : len(tokens)] = torch.from_numpy(tokens)
        self._batch.num_tokens[0] = len(tokens)
        self._drafts.look_up(np.zeros(1, np.int32))
        found = self._drafts.get_found(0)
        if found is None:
            return np.zeros(0, np.int32)
        self._limits.set_levels(np.zeros(1, np.intp), int32_view(found.levels))
        return int32_view(found.token_ids)

    def result(self) -> dict[str, float]:
        return {
            "gain": round(self.num_tokens * self.cost(1) / self.ms, 2),
            "tokens_per_step": round(self.num_tokens / self.num_steps, 2),
            "right": round(self.num_right / max(self.num_drafts, 1), 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=None, help="default: the default model")
    parser.add_argument("--costs", type=json.loads, help="JSON: ms of a step by its rows")
    parser.add_argument("--count", type=int, default=16, help="edits of each kind")
    given = parser.parse_args()
    model = given.model or default_model()
    costs = {int(rows): float(ms) for rows, ms in (given.costs or {}).items()}
    costs = dict(sorted(costs.items())) or measure_costs(model)
    print(json.dumps({"ms": {rows: round(ms, 2) for rows, ms in costs.items()}}), flush=True)
    resolved = resolve_model(ModelOptions(model=model), Console())
    tokenizer = load_tokenizer(resolved.config.tokenizer_path)
    for kind, make in KINDS.items():
        rng, replay = random.Random(kind), Replay(costs)
        for _ in range(given.count):
            old, new = make(rng)
            prompt = list(tokenizer.encode(f"Edit this:\n```python\n{old}\n```\n\n```python\n"))
            replay.run(prompt, list(tokenizer.encode(f"{new}\n```")))
        print(json.dumps({"kind": kind, **replay.result()}), flush=True)


if __name__ == "__main__":
    main()
