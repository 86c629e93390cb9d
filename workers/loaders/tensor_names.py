"""Translate a checkpoint's tensor names to those of another architecture."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TypeAlias

TensorNames: TypeAlias = tuple[tuple[str, str], ...]
"""Regular expressions and their replacements, which are applied in order."""


def translate_names(stored_names: Collection[str], tensor_names: TensorNames) -> dict[str, str]:
    """Return a mapping from each translated name to the stored name."""
    rules = [(re.compile(pattern), replacement) for pattern, replacement in tensor_names]
    translated = {}
    for stored in stored_names:
        name = stored
        for pattern, replacement in rules:
            name = pattern.sub(replacement, name)
        if name:
            translated[name] = stored
    return translated
