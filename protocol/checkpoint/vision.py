"""Reads the vision tower of a checkpoint: what turns an image into embeddings for the decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from .config_fields import ConfigFields

MAX_SIDE: Final = 4096
"""Upper bound of the side of an image that a tower reads, in pixels."""


@dataclass(frozen=True)
class VisionSpec:
    """A vision transformer (arXiv 2010.11929) and its projection into the decoder's hidden size.

    It reads square images of `image_size` pixels in patches of `patch_size`, each side by itself. The features are the
    hidden states after each of `feature_layers`, side by side; later layers are not computed. CLIP (arXiv 2103.00020)
    has a class token and a norm before the layers, SigLIP (arXiv 2303.15343) a norm after them and a bias on patches.

    InternVL (arXiv 2504.10479) has stored factors on the output of each block, and may have norms of queries and keys,
    over all heads together.

    First `shuffle_factor` squared neighboring patches become one row, which is normed with `has_projection_norm`. Then
    the projection is a "matrix" (Idefics3, arXiv 2408.12637), or an "mlp": two matrices with `projection_activation`
    between them (LLaVA, arXiv 2310.03744).

    `tensor_names` translates the checkpoint's tensor names to those of CLIP, as in `ModelSpec`.
    """

    image_size: int
    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    feature_layers: tuple[int, ...]
    activation: str
    norm_eps: float
    output_size: int
    projection: Literal["matrix", "mlp"]
    shuffle_factor: int = 1
    projection_activation: str = "gelu"
    projection_bias: bool = True
    has_projection_norm: bool = False
    has_class_token: bool = False
    keeps_class_token: bool = False
    has_patch_bias: bool = True
    has_pre_norm: bool = False
    has_post_norm: bool = False
    norm_kind: Literal["layer", "rms"] = "layer"
    has_layer_scales: bool = False
    has_qk_norm: bool = False
    qkv_bias: bool = True
    tensor_names: tuple[tuple[str, str], ...] = ()

    @property
    def num_patches(self) -> int:
        """The number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_outputs(self) -> int:
        """The number of embeddings of an image, of which each takes the place of a token."""
        return self.num_patches // self.shuffle_factor**2 + self.keeps_class_token


def has_vision(fields: ConfigFields) -> bool:
    """Return whether a model with this config has a vision tower that Engine computes."""
    return fields.text("model_type", "") in _READERS and fields.section("vision_config") is not None


def vision_spec(fields: ConfigFields, output_size: int) -> VisionSpec:
    """Return the vision tower of a model with this config, which `has_vision`.

    Args:
        fields: The content of a config.json.
        output_size: The hidden size of the decoder.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    read = _READERS[fields.text("model_type")]
    return read(fields, fields.required_section("vision_config"), output_size)


def _idefics3(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    image_size, patch_size = _sizes(vision, 224, 32)
    factor = fields.integer("scale_factor", 2, maximum=64)
    _check_factor(fields, "scale_factor", factor, image_size // patch_size)
    return VisionSpec(
        image_size=image_size,
        patch_size=patch_size,
        hidden_size=vision.integer("hidden_size", 1152),
        intermediate_size=vision.integer("intermediate_size", 3072),
        num_heads=_num_heads(vision, "hidden_size", 1152, 16),
        feature_layers=(
            vision.with_defaults(num_hidden_layers=12).layer_count("num_hidden_layers"),
        ),
        activation=vision.text("hidden_act", "gelu_pytorch_tanh"),
        norm_eps=vision.positive("layer_norm_eps", 1e-6),
        output_size=output_size,
        projection="matrix",
        shuffle_factor=factor,
        projection_bias=False,
        has_post_norm=True,
    )


def _llava(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    is_clip = vision.text("model_type", "clip_vision_model") == "clip_vision_model"
    if not is_clip and vision.text("model_type") != "siglip_vision_model":
        raise vision.wrong(
            "model_type", "clip_vision_model or siglip_vision_model", vision.get("model_type")
        )
    image_size, patch_size = _sizes(vision, 224, 32 if is_clip else 16)
    num_layers = vision.with_defaults(num_hidden_layers=12).layer_count("num_hidden_layers")
    layers = _feature_layers(fields, num_layers, -2)
    strategy = fields.text("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise fields.wrong("vision_feature_select_strategy", "'default' or 'full'", strategy)
    if strategy == "default" and not is_clip:
        raise fields.wrong(
            "vision_feature_select_strategy", "'full' without a class token", strategy
        )
    return VisionSpec(
        image_size=image_size,
        patch_size=patch_size,
        hidden_size=vision.integer("hidden_size", 768),
        intermediate_size=vision.integer("intermediate_size", 3072),
        num_heads=_num_heads(vision, "hidden_size", 768, 12),
        feature_layers=layers,
        activation=vision.text("hidden_act", "quick_gelu" if is_clip else "gelu_pytorch_tanh"),
        norm_eps=vision.positive("layer_norm_eps", 1e-5 if is_clip else 1e-6),
        output_size=output_size,
        projection="mlp",
        projection_activation=fields.text("projector_hidden_act", "gelu"),
        projection_bias=fields.boolean("multimodal_projector_bias", True),
        has_class_token=is_clip,
        keeps_class_token=is_clip and strategy == "full",
        has_patch_bias=not is_clip,
        has_pre_norm=is_clip,
    )


def _internvl(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    image_size, patch_size = _sizes(vision, 448, 14)
    factor = round(1 / fields.positive("downsample_ratio", 0.5))
    _check_factor(fields, "downsample_ratio 1 /", factor, image_size // patch_size)
    num_layers = vision.with_defaults(num_hidden_layers=24).layer_count("num_hidden_layers")
    layers = _feature_layers(fields, num_layers, -1)
    is_last = layers == (num_layers,)
    norm_kind = vision.text("norm_type", "layer_norm")
    if norm_kind not in ("layer_norm", "rms_norm"):
        raise vision.wrong("norm_type", "'layer_norm' or 'rms_norm'", norm_kind)
    strategy = fields.text("vision_feature_select_strategy", "default")
    if strategy != "default":
        raise fields.wrong("vision_feature_select_strategy", "'default'", strategy)
    return VisionSpec(
        image_size=image_size,
        patch_size=patch_size,
        hidden_size=vision.integer("hidden_size", 1024),
        intermediate_size=vision.integer("intermediate_size", 4096),
        num_heads=_num_heads(vision, "hidden_size", 1024, 16),
        feature_layers=layers,
        activation=vision.text("hidden_act", "gelu"),
        norm_eps=vision.positive("layer_norm_eps", 1e-6),
        output_size=output_size,
        projection="mlp",
        shuffle_factor=factor,
        projection_activation=fields.text("projector_hidden_act", "gelu"),
        has_projection_norm=True,
        has_class_token=True,
        has_post_norm=is_last and not vision.boolean("use_mean_pooling", True),
        norm_kind="rms" if norm_kind == "rms_norm" else "layer",
        has_layer_scales=True,
        has_qk_norm=vision.boolean("use_qk_norm", False),
        qkv_bias=vision.boolean("attention_bias", False),
        tensor_names=_INTERNVL_NAMES,
    )


_INTERNVL_NAMES: Final = (
    (r"embeddings\.cls_token$", "embeddings.class_embedding"),
    (r"embeddings\.patch_embeddings\.projection\.", "embeddings.patch_embedding."),
    (r"embeddings\.position_embeddings$", "embeddings.position_embedding.weight"),
    (r"encoder\.layer\.", "encoder.layers."),
    (r"\.attention\.projection_layer\.", ".self_attn.out_proj."),
    (r"\.attention\.", ".self_attn."),
    (r"\.layernorm_before\.", ".layer_norm1."),
    (r"\.layernorm_after\.", ".layer_norm2."),
    (r"vision_tower\.layernorm\.", "vision_tower.post_layernorm."),
)


def _feature_layers(fields: ConfigFields, num_layers: int, default: int) -> tuple[int, ...]:
    """Return the layers whose outputs are the features, counted from 1."""
    chosen = fields.get("vision_feature_layer", default)
    layers = tuple(chosen) if isinstance(chosen, list) else (chosen,)
    # Like indices of a list of the hidden states, of which the first is before the layers.
    if not layers or not all(
        type(i) is int and -num_layers <= i <= num_layers and i for i in layers
    ):
        raise fields.wrong("vision_feature_layer", f"of the {num_layers} layers", chosen)
    return tuple(i if i > 0 else num_layers + 1 + i for i in layers)


def _check_factor(fields: ConfigFields, name: str, factor: int, num_patches: int) -> None:
    if factor < 1 or num_patches % factor:
        raise fields.error(f"{name} {factor} does not divide the {num_patches} patches of a side")


def _sizes(vision: ConfigFields, image_size: int, patch_size: int) -> tuple[int, int]:
    """Return the sides of an image and of a patch."""
    if vision.integer("num_channels", 3) != 3:
        raise vision.wrong("num_channels", "3", vision.get("num_channels"))
    # A side may be given for both directions.
    sides = {
        name: value[0]
        for name in ("image_size", "patch_size")
        if isinstance(value := vision.get(name), list) and len(value) == 2 and value[0] == value[1]
    }
    vision = vision.with_values(sides)
    image_size = vision.integer("image_size", image_size, maximum=MAX_SIDE)
    return image_size, vision.integer("patch_size", patch_size, maximum=image_size)


def _num_heads(vision: ConfigFields, size_name: str, size: int, default: int) -> int:
    num_heads, size = (
        vision.integer("num_attention_heads", default),
        vision.integer(size_name, size),
    )
    if size % num_heads:
        raise vision.error(
            f"{vision.prefix}{size_name} {size} must be a multiple of num_attention_heads {num_heads}"
        )
    return num_heads


_READERS: Final[dict[str, Callable[[ConfigFields, ConfigFields, int], VisionSpec]]] = {
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "internvl": _internvl,
    "llava": _llava,
}
