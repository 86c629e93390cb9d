"""Read the config fields that vision towers have in common."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..config_fields import ConfigFields
from .spec import MAX_SIDE


class Sizes(NamedTuple):
    """The sizes of a vision transformer whose config does not contain them, and its other usual settings."""

    image_size: int
    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_layers: int
    activation: str = "gelu_pytorch_tanh"
    norm_eps: float = 1e-6


def read_sizes(vision: ConfigFields, default: Sizes) -> dict[str, Any]:
    """Return the fields of a `VisionSpec` that most configs contain, as keyword arguments.

    The features are those of the last layer.
    """
    image_size, patch_size = image_and_patch_size(vision, default.image_size, default.patch_size)
    num_layers = vision.with_defaults(num_hidden_layers=default.num_layers)
    return {
        "image_size": image_size,
        "patch_size": patch_size,
        "hidden_size": vision.integer("hidden_size", default.hidden_size),
        "intermediate_size": vision.integer("intermediate_size", default.intermediate_size),
        "num_heads": head_count(vision, default.hidden_size, default.num_heads),
        "feature_layers": (num_layers.layer_count("num_hidden_layers"),),
        "activation": vision.text("hidden_act", default.activation),
        "norm_eps": vision.positive("layer_norm_eps", default.norm_eps),
    }


def feature_layers(fields: ConfigFields, sizes: dict[str, Any], default: int) -> tuple[int, ...]:
    """Return the layers, counted from 1, whose outputs are the features. `sizes` are those of `read_sizes`."""
    (num_layers,) = sizes["feature_layers"]
    chosen = fields.get("vision_feature_layer", default)
    layers = tuple(chosen) if isinstance(chosen, list) else (chosen,)
    # The config indexes a list of hidden states that begins with the input of the first layer.
    if not layers or not all(
        type(i) is int and -num_layers <= i <= num_layers and i for i in layers
    ):
        raise fields.wrong(
            "vision_feature_layer", f"one or more of the {num_layers} layers", chosen
        )
    return tuple(i if i > 0 else num_layers + 1 + i for i in layers)


def check_factor(fields: ConfigFields, name: str, factor: int, num_patches: int) -> None:
    """Raise CheckpointError unless squares of `factor` x `factor` patches tile an image."""
    if factor < 1 or num_patches % factor:
        raise fields.error(f"{name} {factor} does not divide the {num_patches} patches of a side")


def image_and_patch_size(vision: ConfigFields, image_size: int, patch_size: int) -> tuple[int, int]:
    """Return the side of an image and of a patch in pixels."""
    vision.require("num_channels", 3)
    # The config may give the side once, or for both directions.
    sides = {
        name: value[0]
        for name in ("image_size", "patch_size")
        if isinstance(value := vision.get(name), list) and len(value) == 2 and value[0] == value[1]
    }
    vision = vision.with_values(sides)
    image_size = vision.integer("image_size", image_size, maximum=MAX_SIDE)
    return image_size, vision.integer("patch_size", patch_size, maximum=image_size)


def require_rotated_pairs(
    vision: ConfigFields, size: int, num_heads: int, name: str = "num_attention_heads"
) -> None:
    """Raise CheckpointError if the elements of a head cannot be rotated, half by a patch's row and half by its column.

    Elements are rotated in pairs.
    """
    if size % (4 * num_heads):
        raise vision.error(
            f"the hidden size {size} of the vision tower must be a multiple of 4 times {name} {num_heads}"
        )


def head_count(vision: ConfigFields, size: int, default: int) -> int:
    """Return the number of attention heads, checked to divide the hidden size (by default `size`)."""
    num_heads, size = (
        vision.integer("num_attention_heads", default),
        vision.integer("hidden_size", size),
    )
    if size % num_heads:
        raise vision.error(
            f"{vision.prefix}hidden_size {size} must be a multiple of num_attention_heads {num_heads}"
        )
    return num_heads
