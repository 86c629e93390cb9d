"""Read the vision tower of Donut, whose places attend in windows that are shifted in every other block (Swin)."""

from __future__ import annotations

from typing import Final

import msgspec

from ...config_fields import ConfigFields
from ..spec import MAX_SIDE, TowerSpec

_DEPTHS: Final = (2, 2, 6, 2)
_HEADS: Final = (3, 6, 12, 24)


class SwinStage(msgspec.Struct, frozen=True):
    """A stage: `depth` blocks with attention between places. Stages but the last end by joining 2 x 2 places."""

    depth: int
    size: int
    num_heads: int


class SwinSpec(TowerSpec, frozen=True):
    """The tower of Donut (arXiv 2111.15664): a Swin (arXiv 2103.14030) without a norm at its end.

    Attributes:
        height: The number of rows of pixels of a page.
        width: The number of columns of pixels of a page.
        window_size: The side, in places, of the windows in which places attend to each other. In every other block,
            windows are shifted by half of it, unless the places of a stage are not more than a window in a direction.
        mlp_ratio: The factor between the channels within an MLP and those outside.
        qkv_bias: True if queries, keys and values have biases.
    """

    height: int
    width: int
    patch_size: int
    stages: tuple[SwinStage, ...]
    window_size: int
    mlp_ratio: float
    qkv_bias: bool
    activation: str
    norm_eps: float

    @property
    def output_size(self) -> int:
        """The number of elements of an embedding, which cross attention reads."""
        return self.stages[-1].size

    def num_places(self, stage: int) -> tuple[int, int]:
        """Return the numbers of rows and columns of places of a stage."""
        rows, columns = (-(-side // self.patch_size) for side in (self.height, self.width))
        for _ in range(stage):
            rows, columns = -(-rows // 2), -(-columns // 2)
        return rows, columns

    @property
    def num_page_outputs(self) -> int:
        """The number of embeddings of a page."""
        rows, columns = self.num_places(len(self.stages) - 1)
        return rows * columns


def donut(fields: ConfigFields, vision: ConfigFields, output_size: int) -> SwinSpec:
    """Return the tower of Donut."""
    vision.require_all(num_channels=3, use_absolute_embeddings=False)
    size = vision.get("image_size", 224)
    height, width = (
        vision.with_values({"image_size": each}).integer("image_size", maximum=MAX_SIDE)
        for each in (size if isinstance(size, list) and len(size) == 2 else (size, size))
    )
    depths = vision.integers("depths") if vision.get("depths") is not None else list(_DEPTHS)
    if not 0 < len(depths) < 9 or not all(0 < depth < 1000 for depth in depths):
        raise vision.wrong("depths", "1 to 8 numbers of blocks", depths)
    heads = vision.per_layer("num_heads", len(depths)) or _HEADS[: len(depths)]
    first = vision.integer("embed_dim", 96, maximum=1 << 14)
    stages = []
    for index, (depth, given) in enumerate(zip(depths, heads, strict=True)):
        own, channels = vision.with_values({"num_heads": given}), first << index
        stages.append(SwinStage(depth, channels, own.divisor("num_heads", channels, 1)))
    spec = SwinSpec(
        height=height,
        width=width,
        patch_size=vision.integer("patch_size", 4, maximum=min(height, width)),
        stages=tuple(stages),
        window_size=vision.integer("window_size", 7, maximum=MAX_SIDE),
        mlp_ratio=vision.positive("mlp_ratio", 4.0),
        qkv_bias=vision.boolean("qkv_bias", True),
        activation=vision.text("hidden_act", "gelu"),
        norm_eps=vision.positive("layer_norm_eps", 1e-5),
    )
    fewest = min(spec.num_places(len(stages) - 1))
    if fewest < spec.window_size:
        needed = f"at most {fewest}, the places of a side of the last stage"
        raise vision.wrong("window_size", needed, spec.window_size)
    text = fields.required_section("text_config")
    if spec.output_size != text.integer("cross_attention_hidden_size", output_size):
        raise vision.wrong("embed_dim", f"{output_size >> (len(stages) - 1)}, as d_model", first)
    return spec
