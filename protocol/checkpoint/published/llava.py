"""Read the configs of LLaVA as its authors publish it, which name their vision tower instead of describing it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from ..config_fields import ConfigFields
from .renamed import nested

_CLIP: Final = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
}
_TOWERS: Final = {
    "clip-vit-large-patch14": _CLIP | {"image_size": 224},
    "clip-vit-large-patch14-336": _CLIP | {"image_size": 336},
    "siglip-so400m-patch14-384": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "image_size": 384,
        "patch_size": 14,
    },
}
"""The sizes of the towers that configs name, by the last part of the name."""

_DECODERS: Final = {
    "LlavaLlamaForCausalLM": "llama",
    "LlavaMistralForCausalLM": "mistral",
    "LlavaQwenForCausalLM": "qwen2",
    "Phi4ForCausalLMV": "phi3",
}
_HALF: Final = [0.5, 0.5, 0.5]


def llava(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of a LLaVA, LLaVA-NeXT or LLaVA-OneVision."""
    fields.require("mm_projector_type", "mlp2x_gelu")
    vision = _tower(fields)
    side, is_clip = vision.integer("image_size"), vision.text("model_type") == _CLIP["model_type"]
    kind, layout = _layout(fields, side)
    feature = fields.choice("mm_vision_select_feature", ("patch", "cls_patch"), "patch")
    layer = fields.get("mm_vision_select_layer", -2)
    return (
        {
            "architectures": [f"{kind}ForConditionalGeneration"],
            "text_config": nested(fields, _DECODERS[architecture]),
            "vision_config": vision.config,
            # The authors' code drops the last layer of a SigLIP, whatever the config says.
            "vision_feature_layer": layer if is_clip else -2,
            "vision_feature_select_strategy": "default"
            if is_clip and feature == "patch"
            else "full",
            "projector_hidden_act": "gelu",
            "multimodal_projector_bias": True,
            "image_processor": _processor(side, is_clip),
            "vision_tower_field": "mm_vision_tower",
        }
        | layout
        | _place()
    )


def phi4(fields: ConfigFields, architecture: str) -> dict[str, Any]:
    """Return the fields of Phi-4-reasoning-vision, whose code is LLaVA's."""
    fields.require("mm_projector_type", "mlp2x_gelu")
    vision = fields.required_section("vision_config")
    layers = vision.with_defaults(num_hidden_layers=27).integer("num_hidden_layers", minimum=2)
    patch_size = vision.integer("patch_size", 16, maximum=256)
    least = fields.integer("min_num_patches", 256)
    most = fields.integer("max_num_patches", 3600, minimum=least, maximum=1 << 20)
    return {
        "architectures": ["Phi4SiglipForCausalLM"],
        "model_type": "phi4_siglip",
        "text_config": nested(fields, _DECODERS[architecture]),
        # The features are the inputs of the last layer.
        "vision_config": {**vision.config, "num_hidden_layers": layers - 1},
        "projector_hidden_size": fields.integer("hidden_size"),
        "image_processor": {
            "patch_size": patch_size,
            "min_pixels": least * patch_size**2,
            "max_pixels": most * patch_size**2,
        },
    } | _place("<|dummy_0|>")


def _tower(fields: ConfigFields) -> ConfigFields:
    """Return the fields of the vision tower, which may be a directory or, beside its name, a section of the config."""
    own = fields.section("vision_config")
    if own is not None:
        return own
    name = fields.text("mm_vision_tower")
    file = Path(name) / "config.json"
    if file.is_file():
        found = ConfigFields.read(file)
        return found.section("vision_config") or found
    sizes = _TOWERS.get(name.rsplit("/", 1)[-1])
    if sizes is None:
        raise fields.wrong("mm_vision_tower", f"one of {', '.join(_TOWERS)}", name)
    return ConfigFields(sizes, fields.path, "vision_config.")


def _layout(fields: ConfigFields, side: int) -> tuple[str, dict[str, Any]]:
    """Return the name of the model in transformers, and its fields for the layout of an image."""
    ratio = fields.get("image_aspect_ratio") or "square"
    if ratio in ("square", "pad"):
        return "Llava", {"model_type": "llava", "image_aspect_ratio": ratio}
    fields.require("mm_patch_merge_type", "spatial_unpad", default="flat")
    grids = {"image_grid_pinpoints": _grids(fields, side)}
    if ratio == "anyres":
        return "LlavaNext", grids | {"model_type": "llava_next"}
    return "LlavaOnevision", grids | {
        "model_type": "llava_onevision",
        "vision_aspect_ratio": ratio,
    }


def _grids(fields: ConfigFields, side: int) -> object:
    """Return the sizes of grids as [height, width] in pixels.

    The config gives them as [width, height], or as the first and the last number of tiles.
    """
    found = fields.get("image_grid_pinpoints")
    if not isinstance(found, str):
        is_list = isinstance(found, list) and all(isinstance(size, list) for size in found)
        return [size[::-1] for size in found] if is_list else found
    bounds = [tuple(map(int, pair)) for pair in re.findall(r"\((\d{1,2})x(\d{1,2})\)", found)]
    if not bounds:
        raise fields.wrong("image_grid_pinpoints", "a list, or text like '(1x1),...,(6x6)'", found)
    (x, y), (last_x, last_y) = bounds[0], bounds[-1]
    widths = range(x, last_x + 1)
    return [[side * h, side * w] for w in widths for h in range(y, last_y + 1)]


def _processor(side: int, is_clip: bool) -> dict[str, Any]:
    """Return the fields of the tower's own image processor, which the checkpoint need not have."""
    if is_clip:
        sides = {"height": side, "width": side}
        return {"size": {"shortest_edge": side}, "crop_size": sides}
    return {
        "size": {"height": side, "width": side},
        "image_mean": _HALF,
        "image_std": _HALF,
    }


_PARTS: Final = ("image_newline", "mm_projector", "vision_resampler", "vision_tower")


def _place(*tokens: str) -> dict[str, Any]:
    """Return the fields for the place of an image in a prompt.

    The authors' code replaces the mark, which is no token, by -200. The tokenizer has one of these tokens instead.
    """
    return {
        "image_mark": "<image>",
        "image_parts": [f"model.{name}" for name in _PARTS],
        "image_token_id": None,
        "image_token_index": None,
        "image_token_texts": ["<image>", *tokens, "<unk>", "<|endoftext|>"],
    }
