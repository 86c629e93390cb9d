"""Read the configs of Janus and DeepSeek-VL as DeepSeek publishes them, which name the parts of the model."""

from __future__ import annotations

from typing import Any, Final

from ..config_fields import ConfigFields

_TOWER: Final = "siglip_large_patch16_384"
_SIZES: Final = {
    "hidden_size": 1024,
    "mlp_ratio": 4.0,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 16,
}


def multi_modality(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of a Janus, which has parts that make images, or of a DeepSeek-VL 1.3B, which has none."""
    text = fields.required_section("language_config")
    own = fields.required_section("vision_config")
    vision = own.required_section("params")
    own.require("cls", "CLIPVisionTower")
    vision.require("model_name", _TOWER)
    vision.require("select_layer", -1)
    vision.require("select_feature", "same")
    aligner = fields.required_section("aligner_config").required_section("params")
    aligner.require("projector_type", "mlp_gelu")
    aligner.require("depth", 2)
    # A smaller model gives its sizes.
    sizes = vision.with_defaults(**_SIZES)
    inner = int(sizes.integer("hidden_size") * sizes.positive("mlp_ratio"))
    name, kind = "DeepseekVL", "deepseek_vl"
    if fields.section("gen_vision_config") is not None:
        name, kind = "Janus", "janus"
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": {"model_type": "llama", "tie_word_embeddings": False, **text.config},
        "vision_config": {each: sizes.get(each) for each in _SIZES}
        | {"image_size": vision.integer("image_size", 384), "intermediate_size": inner}
        | {"hidden_act": "gelu", "depth": 2, "projection_dim": aligner.integer("n_embed")},
        "image_token_texts": ["<image_placeholder>"],
    }
