"""Translate a checkpoint's tensor names to those of another architecture."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TypeAlias

TensorNames: TypeAlias = tuple[tuple[str, str], ...]
"""Regular expressions and their replacements, which are applied in order."""

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
"""The ends of the translated names of the embedding and of the output projection."""


def translate_names(stored_names: Collection[str], tensor_names: TensorNames) -> dict[str, str]:
    """Return a mapping from each translated name to the stored name.

    If several tensors get one name, the tensor whose first rule comes earliest is taken.
    """
    rules = [(re.compile(pattern), replacement) for pattern, replacement in tensor_names]
    translated: dict[str, str] = {}
    ranks: dict[str, int] = {}
    for stored in stored_names:
        name, rank = stored, len(rules)
        for index, (pattern, replacement) in enumerate(rules):
            name, num_changes = pattern.subn(replacement, name)
            rank = min(rank, index) if num_changes else rank
        if name and rank <= ranks.get(name, rank):
            translated[name], ranks[name] = stored, rank
    return translated
