"""The differences between the files of a family that transformers lacks and the files of another family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers
from support.families.published import changes


@dataclass(frozen=True)
class Published:
    """A family, and how its files differ from those of the model `base` of `CONFIGS`.

    Attributes:
        base: The model of `CONFIGS`.
        differences: The fields that differ in that model's config.
        config: The fields of the published config, without those that are None.
        names: Regular expressions and their replacements in the names of tensors.
        change: Changes the tensors before they are renamed.
        section: The section of the published config that has the fields of the text decoder.
        suffix: The end of the architecture's name; by default that of transformers.
        prepare: Changes the model of transformers before it is saved.
    """

    base: str
    differences: Mapping[str, Any]
    config: Mapping[str, Any]
    names: tuple[tuple[str, str], ...] = ()
    change: Callable[[changes.Tensors], changes.Tensors] = field(default=changes.unchanged)
    section: tuple[str, ...] = ()
    suffix: str | None = None
    prepare: Callable[[transformers.PreTrainedModel], None] | None = None
