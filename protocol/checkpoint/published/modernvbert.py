"""Read the configs of ModernVBERT and UltraVBERT, whose classes are not in their text sections."""

from __future__ import annotations

from typing import Any, Final

from ..config_fields import ConfigFields

_FIELDS: Final = ("classifier_pooling", "id2label", "num_labels", "problem_type")


def modernvbert(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of the text section, completed with those of the head."""
    text = fields.required_section("text_config").config
    own = {name: fields.get(name) for name in _FIELDS}
    return {
        "text_config": {**text, **own, "classifier_pooling": own["classifier_pooling"] or "cls"}
    }


def ultravbert(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the same fields of an UltraVBERT, which is served without its tower."""
    return modernvbert(fields, architecture) | {
        "image_parts": ["model.vision_model", "model.connector", "vision_model", "connector"]
    }
