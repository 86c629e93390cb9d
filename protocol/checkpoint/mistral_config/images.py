"""Translate the vision encoder of a ``params.json`` into the sections of Pixtral or Mistral 3."""

from __future__ import annotations

from typing import Any, Final

from ..config_fields import ConfigFields

_TOWER_FIELDS: Final = (
    "hidden_size",
    "image_size",
    "intermediate_size",
    "num_attention_heads",
    "num_channels",
    "num_hidden_layers",
    "patch_size",
    "rope_theta",
)
_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_DEVIATION: Final = (0.26862954, 0.26130258, 0.27577711)
"""The colors' mean and standard deviation, which are CLIP's (arXiv 2103.00020)."""


def with_images(params: ConfigFields, text: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the whole model: that of its decoder, or one with a vision tower and a section for images.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    encoder = params.section("vision_encoder")
    if encoder is None:
        return text
    merges = encoder.get("mm_projector_id") == "patch_merge"
    if not merges and encoder.get("mm_projector_id"):
        raise encoder.wrong(
            "mm_projector_id", "'patch_merge' or ''", encoder.get("mm_projector_id")
        )
    encoder.require("add_pre_mm_projector_layer_norm", merges, default=False)
    size, patch_size = encoder.integer("image_size"), encoder.integer("patch_size")
    config = {
        "model_type": "mistral3" if merges else "llava",
        "architectures": [
            "Mistral3ForConditionalGeneration" if merges else "LlavaForConditionalGeneration"
        ],
        "text_config": text,
        "vision_config": {
            "model_type": "pixtral",
            "hidden_act": "silu",
            **{name: encoder.get(name) for name in _TOWER_FIELDS},
        },
        "image_token_index": encoder.integer("image_token_id", 10, minimum=0),
        "multimodal_projector_bias": encoder.boolean("adapter_bias", False),
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "spatial_merge_size": encoder.integer("spatial_merge_size", 1),
        "tie_word_embeddings": text["tie_word_embeddings"],
        "eos_token_id": text["eos_token_id"],
        "image_processor": {
            "size": {"longest_edge": encoder.integer("max_image_size", size)},
            "patch_size": {"height": patch_size, "width": patch_size},
            "image_mean": list(_MEAN),
            "image_std": list(_DEVIATION),
        },
    }
    if "quantization_config" in text:
        config["quantization_config"] = text["quantization_config"]
    return config
