"""How a part of `gpu.py` tells what it measures: a JSON object a line, named by its `case`."""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any

FAILED = "failed"
_LONGEST_MESSAGE = 400


class LostDevice(SystemExit):
    """A GPU that has failed is lost to this process, not to the next."""

    def __init__(self, case: str) -> None:
        super().__init__(f"{case}: the GPU is lost to this process")
        self.case = case


class Reporter:
    """Measures what is not `done` yet. One measurement that fails must not cost the others."""

    def __init__(self, done: Collection[str] = ()) -> None:
        self._done = frozenset(done)

    def say(self, case: str, measure: Callable[[], Mapping[str, Any] | None]) -> None:
        """Print what `measure` finds. Raises LostDevice if the GPU is of no use after it."""
        if case in self._done:
            return
        # This stands if the process does not come back from it.
        _print(case, {FAILED: "began, and did not end"})
        try:
            found = measure() or {}
        except Exception as error:
            traceback.print_exc()
            found = {FAILED: _shortened(f"{type(error).__name__}: {error}")}
        _print(case, found)
        if FAILED in found and _is_lost():
            raise LostDevice(case)


def add_done(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--done", nargs="*", default=(), help="cases that are not to be measured")


def _shortened(message: str) -> str:
    """What is first, and what is last."""
    half = _LONGEST_MESSAGE // 2
    return message if len(message) <= 2 * half else f"{message[:half]} … {message[-half:]}"


def _print(case: str, found: Mapping[str, Any]) -> None:
    print(json.dumps({"case": case, **found}), flush=True)


def _is_lost() -> bool:
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
