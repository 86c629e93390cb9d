"""Progress bars for the methods of `LLM`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

ProgressBar: TypeAlias = bool | Callable[..., Any]
"""True for a bar of the package `tqdm`, if it is installed, or a function like `tqdm` that creates a bar."""


@contextmanager
def progress_bar(wanted: ProgressBar, total: int) -> Iterator[Callable[[int], object]]:
    """A context with a progress bar for `total` prompts. It returns a function that adds finished prompts to it."""
    if wanted is True:
        try:
            wanted = importlib.import_module("tqdm.auto").tqdm
        except ImportError:
            wanted = False
    if not callable(wanted):
        yield lambda _: None
        return
    bar = wanted(total=total, desc="Processed prompts")
    try:
        yield bar.update
    finally:
        bar.close()
