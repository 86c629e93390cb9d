"""Read the config of OpenVLA, which names its two vision towers by timm's names."""

from __future__ import annotations

from typing import Any, Final

from ..config_fields import ConfigFields

_DINO: Final = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "image_size": 224,
    "patch_size": 14,
}
_SIGLIP: Final = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "image_size": 224,
    "patch_size": 14,
}
_NAMES: Final = ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]


def openvla(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the sizes of both towers, and the place of an image in a prompt."""
    fields.require_all(
        use_fused_vision_backbone=True, timm_model_ids=_NAMES, image_resize_strategy="resize-naive"
    )
    given = fields.first_section("vision_config")
    return {
        "model_type": "openvla",
        "vision_config": {
            "dinov2": {**_DINO, **given.first_section("dinov2").config},
            "siglip": {**_SIGLIP, **given.first_section("siglip").config},
        },
        "image_mark": "<image>",
        "image_token_texts": ["<PAD>", "<unk>"],
    }
