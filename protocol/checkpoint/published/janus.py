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


_SAM: Final = "sam_b_downsample"
_SAM_SIZES: Final = {
    "hidden_size": 768,
    "mlp_ratio": 4.0,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "output_channels": 256,
    "patch_size": 16,
    "window_size": 14,
    "global_attn_indexes": [2, 5, 8, 11],
}
_HALF: Final = [0.5, 0.5, 0.5]
_CLIP_MEAN: Final = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD: Final = [0.26862954, 0.26130258, 0.27577711]
_BILINEAR: Final = 2
_BICUBIC: Final = 3


def multi_modality(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of a Janus, which has parts that make images, or of a DeepSeek-VL, which has none."""
    text = fields.required_section("language_config")
    own = fields.required_section("vision_config")
    towers = own.required_section("params")
    kinds = ("CLIPVisionTower", "HybridVisionTower")
    is_hybrid = own.choice("cls", kinds, kinds[0]) == kinds[1]
    vision = towers.required_section("low_res_cfg") if is_hybrid else towers
    aligner = fields.required_section("aligner_config").required_section("params")
    aligner.require_all(
        depth=2, projector_type="low_high_hybrid_split_mlp_gelu" if is_hybrid else "mlp_gelu"
    )
    sizes = _tower_sizes(vision, _TOWER, _SIZES)
    inner = int(sizes.integer("hidden_size") * sizes.positive("mlp_ratio"))
    side = vision.integer("image_size", 384)
    name, kind = "DeepseekVL", "deepseek_vl"
    if fields.section("gen_vision_config") is not None:
        name, kind = "Janus", "janus"
    others: dict[str, Any] = {}
    if is_hybrid:
        name, kind = "DeepseekVLHybrid", "deepseek_vl_hybrid"
        towers.require("concat_type", "tuple", default="tuple")
        others = _larger_copy(towers.required_section("high_res_cfg"), vision, side)
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": {"model_type": "llama", "tie_word_embeddings": False, **text.config},
        "vision_config": {each: sizes.get(each) for each in _SIZES}
        | {"image_size": side, "intermediate_size": inner}
        | {"hidden_act": "gelu", "depth": 2, "projection_dim": aligner.integer("n_embed")},
        "image_token_texts": ["<image_placeholder>"],
    } | others


def _tower_sizes(tower: ConfigFields, name: str, sizes: dict[str, Any]) -> ConfigFields:
    """Return the section of the tower of this name; a smaller model gives its sizes."""
    tower.require_all(model_name=name, select_layer=-1, select_feature="same")
    return tower.with_defaults(**sizes)


def _larger_copy(high: ConfigFields, low: ConfigFields, side: int) -> dict[str, Any]:
    """Return the fields for SAM's encoder and for the larger copy of an image, from which the smaller one is made."""
    sizes = _tower_sizes(high, _SAM, _SAM_SIZES)
    high_side = high.integer("image_size", 1024)
    sam = {each: sizes.get(each) for each in _SAM_SIZES} | {"image_size": high_side}
    return {
        "high_res_vision_config": sam,
        # The towers normalize the pixels, which the file of the processor therefore leaves as they are.
        "image_limits": {
            "do_normalize": True,
            "size": {"height": side, "width": side},
            "resample": _BILINEAR,
            "image_mean": low.get("pixel_mean", _HALF),
            "image_std": low.get("pixel_std", _HALF),
            "high_res_size": {"height": high_side, "width": high_side},
            "high_res_resample": _BICUBIC,
            "high_res_image_mean": high.get("pixel_mean", _CLIP_MEAN),
            "high_res_image_std": high.get("pixel_std", _CLIP_STD),
        },
    }
