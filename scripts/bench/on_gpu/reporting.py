"""Report the results of the parts of `gpu.py`: one JSON object per line, identified by its `case`."""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any

FAILED = "failed"
SKIPPED = "skipped"
_LONGEST_MESSAGE = 400


class Spoiled(SystemExit):
    """Raised after an error that invalidates later measurements in this process, but not in another one."""

    def __init__(self, case: str) -> None:
        super().__init__(f"{case} failed: what is left has to be measured by another process")
        self.case = case


class Skipped(Exception):
    """The measurement is not possible on this machine."""


class Reporter:
    """Runs the measurements that are not `done` yet. A failed measurement does not prevent the others.

    If measurements share a state, every failure makes the process unusable. Otherwise only a failure of the GPU does.
    """

    def __init__(self, done: Collection[str] = (), *, share_state: bool = False) -> None:
        self._done = frozenset(done)
        self._share_state = share_state

    def say(self, case: str, measure: Callable[[], Mapping[str, Any] | None]) -> None:
        """Run `measure` and print its result. Raise Spoiled if nothing can be measured afterwards."""
        if case in self._done:
            return
        # This line remains the result if the process crashes during the measurement.
        _print(case, {FAILED: "began, and did not end"})
        try:
            found = measure() or {}
        except Skipped as reason:
            found = {SKIPPED: str(reason)}
        except Exception as error:
            traceback.print_exc()
            found = {FAILED: _shortened(f"{type(error).__name__}: {error}")}
        _print(case, found)
        if FAILED in found and (self._share_state or _has_lost_gpu()):
            raise Spoiled(case)


def add_done(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--done", nargs="*", default=(), help="cases to skip")


def _shortened(message: str) -> str:
    half = _LONGEST_MESSAGE // 2
    return message if len(message) <= 2 * half else f"{message[:half]} … {message[-half:]}"


def _print(case: str, found: Mapping[str, Any]) -> None:
    print(json.dumps({"case": case, **found}), flush=True)


def _has_lost_gpu() -> bool:
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
