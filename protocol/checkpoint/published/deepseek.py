"""Read the config of Unlimited-OCR, a DeepSeek-OCR whose output tokens have a window."""

from __future__ import annotations

from typing import Any, Final

from ..config_fields import ConfigFields

OUTPUT_WINDOW: Final = "output_window"
"""The config field with the number of the last tokens to which an output token attends, beside the prompt.

The keys and values of an output token depend on where the prompt ends.
"""


def unlimited_ocr(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of Unlimited-OCR, in the format of its authors or in that of transformers."""
    text = fields.first_section("text_config", "language_config")
    if others := {*text.texts("layer_types")} - {"reference_sliding_attention"}:
        raise text.wrong("layer_types", "'reference_sliding_attention' alone", sorted(others))
    window = text.integer("sliding_window", fields.integer("sliding_window", 128))
    own = {"model_type": "unlimited_ocr", "sliding_window": None, OUTPUT_WINDOW: window}
    vision = fields.first_section("vision_config")
    found: dict[str, Any] = {
        "architectures": ["UnlimitedOcrForConditionalGeneration"],
        "model_type": "unlimited_ocr",
        "text_config": {**text.config, **own},
    }
    if vision.section("sam_config") is None:
        return found
    names = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
    widths = {}
    for ours, theirs in (("sam_vit_b", "sam_config"), ("clip-l-14-224", "encoder_config")):
        section = vision.first_section(theirs)
        sizes = {
            name: section.get(other) for name, other in names.items() if other in section.config
        }
        widths[ours] = {**section.config, **sizes}
    return found | {
        "vision_config": {"width": widths},
        "projector_config": {"projector_type": "linear"},
    }
