"""Choose one of several mmproj files (towers) of a GGUF model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_TYPES: Final = ("bf16", "f16", "f32", "q8_0")
"""The number types of mmproj files, in order of preference."""


def choose_mmproj(names: Iterable[str]) -> str | None:
    """Return the name of the mmproj file with the preferred type; None if there is no such file."""
    found = sorted(name for name in names if name.endswith(".gguf") and "mmproj" in name)
    return min(found, key=_preference, default=None)


def _preference(name: str) -> int:
    return next((i for i, kind in enumerate(_TYPES) if kind in name.lower()), len(_TYPES))
