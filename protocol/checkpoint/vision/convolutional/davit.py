"""Read the vision tower of Florence-2, whose places attend in windows, and channels to each other (DaViT)."""

from __future__ import annotations

from typing import Final

import msgspec

from ...config_fields import ConfigFields
from ..spec import MAX_SIDE, TowerSpec

_DEPTHS: Final = (1, 1, 9, 1)
_SIZES: Final = (128, 256, 512, 1024)
_HEADS: Final = (4, 8, 16, 32)


class DavitStage(msgspec.Struct, frozen=True):
    """A stage: a convolution that reduces both sides of its input, and blocks.

    Attributes:
        depth: The number of blocks. Each has attention between places, and then between channels.
        size: The number of channels.
        kernel: The side, in places, of the convolution's kernel.
        stride: The distance, in places, of neighboring outputs of the convolution.
        padding: The number of zeros at each end of its input.
        norms_first: True if the norm precedes the convolution, which it follows otherwise.
        num_heads: The number of heads between places.
        num_groups: The number of groups of channels, which attend to channels of their own group.
    """

    depth: int
    size: int
    kernel: int
    stride: int
    padding: int
    norms_first: bool
    num_heads: int
    num_groups: int


class DavitSpec(TowerSpec, frozen=True):
    """The tower of Florence-2 (arXiv 2311.06242): a DaViT (arXiv 2204.03645), positions, a product and a norm.

    The first embedding of an image is that of the mean of all places.

    Attributes:
        window_size: The side, in places, of the windows in which places attend to each other.
        mlp_ratio: The factor between the channels within an MLP and those outside.
        qkv_bias: True if queries, keys and values have biases.
        num_positions: The maximum number of places in each direction.
        num_times: The number of rows of the table of times, of which the first is that of images.
        has_transposed_projection: True if the rows of the last product are stored as columns.
    """

    stages: tuple[DavitStage, ...]
    window_size: int
    mlp_ratio: float
    qkv_bias: bool
    activation: str
    num_positions: int
    num_times: int
    output_size: int
    has_transposed_projection: bool = False
    tensor_names: tuple[tuple[str, str], ...] = ()

    def num_places(self, side: int) -> int:
        """Return the number of places in each direction for an image of so many pixels; 0 if it is too small."""
        for stage in self.stages:
            side = max((side + 2 * stage.padding - stage.kernel) // stage.stride + 1, 0)
        return side

    def num_outputs_of(self, side: int) -> int:
        """Return the number of embeddings of a square image of so many pixels in each direction."""
        return self.num_places(side) ** 2 + 1


def florence2(fields: ConfigFields, vision: ConfigFields, output_size: int) -> DavitSpec:
    """Return the tower of Florence-2, from the config of transformers."""
    vision.require("in_channels", 3)
    depths, sizes, kernels, strides, paddings, heads, groups = (
        _integers(vision, name, default)
        for name, default in (
            ("depths", _DEPTHS),
            ("embed_dim", _SIZES),
            ("patch_size", (7, 3, 3, 3)),
            ("patch_stride", (4, 2, 2, 2)),
            ("patch_padding", (3, 1, 1, 1)),
            ("num_heads", _HEADS),
            ("num_groups", _HEADS),
        )
    )
    for name, counts in (("num_heads", heads), ("num_groups", groups)):
        if any(size % count for size, count in zip(sizes, counts, strict=True)):
            raise vision.wrong(name, "divisors of embed_dim", list(counts))
    given = vision.get("patch_prenorm", [False, True, True, True])
    if (
        not isinstance(given, list)
        or len(given) != len(depths)
        or not all(isinstance(each, bool) for each in given)
    ):
        raise vision.wrong("patch_prenorm", f"a list of {len(depths)} booleans", given)
    vision.require(
        "projection_dim", output_size, ", as the hidden size of text_config", default=1024
    )
    spec = DavitSpec(
        stages=tuple(
            map(DavitStage, depths, sizes, kernels, strides, paddings, given, heads, groups)
        ),
        window_size=vision.integer("window_size", 12, maximum=MAX_SIDE),
        mlp_ratio=vision.positive("mlp_ratio", 4.0),
        qkv_bias=vision.boolean("qkv_bias", True),
        activation=vision.text("activation_function", "gelu"),
        num_positions=vision.integer("max_position_embeddings", 50, maximum=MAX_SIDE),
        num_times=vision.integer("max_temporal_embeddings", 100, maximum=1 << 16),
        output_size=output_size,
        has_transposed_projection=vision.boolean("has_transposed_projection", False),
        tensor_names=_PUBLISHED_NAMES,
    )
    if not spec.num_places(MAX_SIDE):
        raise vision.wrong(
            "patch_size", f"sizes that leave a part of {MAX_SIDE} pixels", list(kernels)
        )
    return spec


_PUBLISHED_NAMES: Final = (
    (r"^(vision_tower\.convs\.\d+)\.proj\.", r"\1.conv."),
    (r"(_block\.conv[12])\.fn\.dw\.", r"\1."),
    (r"\.(window|channel)_attn\.norm\.", ".norm1."),
    (r"\.(window|channel)_attn\.fn\.", r".\1_attn."),
    (r"\.ffn\.norm\.", ".norm2."),
    (r"\.ffn\.fn\.net\.", ".ffn."),
    (r"^image_projection$", "multi_modal_projector.image_projection.weight"),
    (r"^image_proj_norm\.", "multi_modal_projector.image_proj_norm."),
    (r"^image_pos_embed\.", "multi_modal_projector.image_position_embed."),
    (r"^visual_temporal_embed\.", "multi_modal_projector.visual_temporal_embed."),
)
"""Translates the names of Microsoft's files. Those of transformers stay as they are."""


def _integers(vision: ConfigFields, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    values = vision.per_layer(name, len(_DEPTHS)) or default
    return tuple(vision.with_values({name: each}).integer(name, maximum=1 << 14) for each in values)
