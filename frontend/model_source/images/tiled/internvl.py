"""Read the image processors of InternVL and DeepSeek-OCR."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import msgspec

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.checkpoint.vision.deepseek import NUM_QUERIES, JoinedVisionSpec, QueryVisionSpec
from .....protocol.checkpoint.vision.grid import GridVisionSpec
from .....protocol.checkpoint.vision.spec import MAX_SIDE, VisionSpec
from .....protocol.config.images.details import ViewsProcessor
from .....protocol.config.images.tiles import CanvasProcessor
from ..fields import BICUBIC, CLIP_VALUES, IMAGENET_VALUES, sides
from ..source import MAX_TILES, ProcessorSource

IMAGE_CONTEXT: Final = "<IMG_CONTEXT>"
"""The text of the placeholder token of InternVL."""


def canvas(source: ProcessorSource, vision: VisionSpec) -> CanvasProcessor:
    """Return the processor of InternVL or Qianfan-OCR."""
    fields = source.fields
    min_tiles, max_tiles = source.tile_counts(1, 12)
    has_own_mark = source.config.text("model_type") == "qianfan_ocr"
    return CanvasProcessor(
        **CLIP_VALUES | source.values(vision, BICUBIC),
        side=source.tile_side(vision),
        splits=fields.boolean("crop_to_patches", True),
        min_tiles=min_tiles,
        max_tiles=max_tiles,
        mark="<image>" if has_own_mark else "",
        start="<img>",
        end="</img>",
    )


def described_canvas(source: ProcessorSource, vision: VisionSpec) -> CanvasProcessor:
    """Return the processor of InternVL in the format of its authors, whose config describes it."""
    source = replace(source, fields=source.config.with_values(source.fields.config))
    fields = source.fields
    splits = fields.boolean("dynamic_image_size", False)
    if splits:
        fields.require("use_thumbnail", True, default=False)
    fields.require("pad2square", False)
    min_tiles = fields.integer("min_dynamic_patch", 1, maximum=MAX_TILES)
    return CanvasProcessor(
        **IMAGENET_VALUES | source.values(vision, BICUBIC),
        side=vision.image_size,
        splits=splits,
        min_tiles=min_tiles,
        max_tiles=fields.integer("max_dynamic_patch", 6, minimum=min_tiles, maximum=MAX_TILES),
        mark="<image>",
        start="<img>",
        end="</img>",
    )


def double_canvas(source: ProcessorSource, vision: VisionSpec) -> CanvasProcessor:
    """Return the processor of H2OVL, which reads an image alone in its prompt as two grids."""
    config = described_canvas(source, vision)
    is_double = source.config.boolean("use_msac", False) and config.splits
    return msgspec.structs.replace(config, is_double=is_double)


def labeled_canvas(source: ProcessorSource, vision: VisionSpec) -> CanvasProcessor:
    """Return the processor of NVLM-D, whose tiles follow their names."""
    return msgspec.structs.replace(
        described_canvas(source, vision),
        start="<Image>",
        end="</Image>",
        tile_label="<tile_{}>",
        whole_label="<tile_global_thumbnail>",
    )


def lined_canvas(source: ProcessorSource, vision: VisionSpec) -> CanvasProcessor:
    """Return the processor of NVILA-Lite, whose tiles end with line feeds, and which splits an image that is alone."""
    return CanvasProcessor(
        **source.values(vision, BICUBIC),
        side=source.tile_side(vision),
        max_tiles=12,
        splits_alone=True,
        tile_end="\n",
        ends_line=True,
    )


def area_canvas(source: ProcessorSource, vision: GridVisionSpec) -> CanvasProcessor:
    """Return the processor of Llama Nemotron Nano VL, whose grids cover at least a part of an image's area."""
    fields, unit = source.fields, vision.unit
    fields.require("use_thumbnail", True)
    side = fields.integer("image_size", source.config.integer("force_image_size", 512))
    if side % unit:
        raise fields.wrong("image_size", f"a multiple of {unit}", side)
    return CanvasProcessor(
        **CLIP_VALUES | source.pixel_values(BICUBIC),
        output_size=vision.output_size,
        num_outputs=(side // unit) ** 2,
        side=side,
        max_tiles=fields.integer("max_num_tiles", 12, maximum=MAX_TILES),
        counts_area=True,
        start="<img>",
        end="</img>",
    )


def half_canvas(source: ProcessorSource, vision: VisionSpec) -> CanvasProcessor:
    """Return the processor of Llama Nemotron Embed VL, whose config or processor_config.json describes it."""
    half = {f"image_{name}": [0.5] * 3 for name in ("mean", "std")}
    processor = ConfigFields.read_if_present(source.path / "processor_config.json")
    fields = source.config.with_values({**processor.config, **source.fields.config})
    splits = fields.boolean("dynamic_image_size", True)
    least, most = (
        fields.integer(
            f"{name}_input_tiles",
            fields.integer(f"{name}_dynamic_patch", 1, maximum=MAX_TILES),
            maximum=MAX_TILES,
        )
        for name in ("min", "max")
    )
    return CanvasProcessor(
        **source.with_defaults(**half).values(vision, BICUBIC),
        side=vision.image_size,
        splits=splits,
        min_tiles=least,
        max_tiles=max(least, most),
        counts_area=True,
        mark="<image>",
        start="<img>",
        end="</img>",
    )


def numbered_canvas(source: ProcessorSource, vision: VisionSpec) -> CanvasProcessor:
    """Return the processor of Eagle 2.5, whose prompts number images and name them by their numbers."""
    fields, config = source.fields, source.config
    fields.require("use_thumbnail", True)
    fields.require("pad_during_tiling", False)
    half = {f"image_{name}": [0.5] * 3 for name in ("mean", "std")}
    least, most = (
        config.integer(f"{name}_dynamic_patch", default, maximum=MAX_TILES)
        for name, default in (("min", 1), ("max", 12))
    )
    least = fields.integer("min_dynamic_tiles", least, maximum=MAX_TILES)
    return CanvasProcessor(
        **source.with_defaults(**half).values(vision, BICUBIC),
        side=vision.image_size,
        min_tiles=least,
        max_tiles=fields.integer("max_dynamic_tiles", most, minimum=least, maximum=MAX_TILES),
        counts_area=True,
        mark="<image-{}>",
        number_start="<image ",
        number_end=">",
        first_number=1,
        start="<img>",
        end="</img>",
    )


def views(source: ProcessorSource, vision: QueryVisionSpec) -> ViewsProcessor:
    """Return the processor of DeepSeek-OCR 2."""
    fields = source.fields
    size = sides(fields, "size")
    splits = fields.boolean("crop_to_patches", True)
    found = (
        (fields, "tile_size", fields.integer("tile_size", 768)),
        (size, "height", size.integer("height", 1024)),
    )
    for (section, name, side), count in zip(found, NUM_QUERIES, strict=True):
        expected = math.isqrt(count) * vision.sam.unit
        if side != expected:
            raise section.wrong(name, f"{expected}, which has {count} queries", side)
    side, whole = (side for _, _, side in found)
    min_tiles, max_tiles = source.tile_counts(2, 6)
    return ViewsProcessor(
        **source.pixel_values(BICUBIC),
        output_size=vision.output_size,
        num_outputs=NUM_QUERIES[1] + 1,
        side=side,
        whole_side=whole if splits else side,
        unit=vision.sam.unit,
        splits=splits,
        min_tiles=min_tiles,
        max_tiles=max_tiles,
        margin=_margin(fields),
    )


def views_of_one(source: ProcessorSource, vision: JoinedVisionSpec) -> ViewsProcessor:
    """Return the processor of Unlimited-OCR, which has more tiles, but none if a prompt has several images."""
    found = views_with_rows(source, vision, 32)
    return msgspec.structs.replace(found, splits_alone=True)


def views_with_rows(
    source: ProcessorSource, vision: JoinedVisionSpec, most_tiles: int = 6
) -> ViewsProcessor:
    """Return the processor of DeepSeek-OCR, whose own code has the sizes."""
    fields, unit = source.fields, vision.sam.unit
    fields.require("crop_to_patches", True)
    side, whole = (
        section.integer(name, default, minimum=unit, maximum=MAX_SIDE)
        for section, name, default in (
            (fields, "tile_size", 640),
            (sides(fields, "size"), "height", 1024),
        )
    )
    for name, length in (("tile_size", side), ("size.height", whole)):
        if length % unit:
            raise fields.wrong(name, f"a multiple of {unit}", length)
    min_tiles, max_tiles = source.tile_counts(2, most_tiles)
    # A single column has the most ends of rows.
    most = max(
        whole // unit * (whole // unit + 1) + 1, max_tiles * (side // unit) * (side // unit + 1)
    )
    return ViewsProcessor(
        **source.pixel_values(BICUBIC),
        output_size=vision.output_size,
        num_outputs=most,
        side=side,
        whole_side=whole,
        unit=unit,
        min_tiles=min_tiles,
        max_tiles=max_tiles,
        margin=_margin(fields),
        has_rows=True,
    )


def _margin(fields: ConfigFields) -> tuple[int, int, int]:
    margin = fields.get("background_color", [127] * 3)
    if not isinstance(margin, list) or len(margin) != 3 or not all(type(x) is int for x in margin):
        raise fields.wrong("background_color", "three integers", margin)
    return margin[0], margin[1], margin[2]
