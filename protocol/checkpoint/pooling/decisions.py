"""Read the classes of a Decision 3.0, a Qwen3.5 that scores the codes of answers after the last token of a prompt.

`decision_config.json` describes the codes. `readout.safetensors` has a row for each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ..config_fields import ConfigFields

DECISIONS: Final = "decision_config.json"
ARCHITECTURE: Final = "D3ForSequenceClassification"
"""The architecture of a Decision 3.0, by vLLM's name. Checkpoints have that of the base model."""

_BASE: Final = "Qwen3_5Model"
_READOUT: Final = "readout.safetensors"
_IMAGE_SIZE: Final = {"shortest_edge": 65_536, "longest_edge": 1_638_400}
"""The limits of the pixels of an image in the authors' own code, which ignores those of the processor's file."""
_BOTH_DIRECTIONS: Final = {"is_causal": False, "classifier_pooling": "last"}
_MODES: Final = ("causal", "noncausal_full_attention")


def decision_fields(config: ConfigFields, decisions: ConfigFields) -> dict[str, Any]:
    """Return the changes of a model's config if `decisions`, the fields of its other file, has any; else nothing.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    if not decisions.config or _BASE not in config.texts("architectures"):
        return {}
    decisions.require("format_version", 1)
    decisions.require("pooling", "last")
    codes = decisions.texts("codes")
    token_ids = decisions.token_ids("token_ids")
    if not codes or len(codes) != len(token_ids):
        raise decisions.error(
            f"token_ids must have one token for each of {len(codes)} codes, got {len(token_ids)}"
        )
    changes: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "id2label": {str(i): code for i, code in enumerate(codes)},
        "num_labels": len(codes),
        # A question has some of the codes, so that probabilities of all have no meaning.
        "problem_type": "regression",
        "image_limits": {"size": _IMAGE_SIZE, "min_pixels": None, "max_pixels": None},
    }
    if decisions.choice("attention_mode", _MODES, _MODES[0]) != _MODES[0]:
        changes |= _BOTH_DIRECTIONS
        if (text := config.section("text_config")) is not None:
            changes["text_config"] = {**text.config, **_BOTH_DIRECTIONS}
    return changes


def find_readout(directory: Path, config: ConfigFields) -> Path | None:
    """Return the file with the rows of codes in a model's directory; None for other models."""
    return directory / _READOUT if ARCHITECTURE in config.texts("architectures") else None
