"""Read the image processors of Idefics 2 and 3, SmolVLM and Granite for Docling."""

from __future__ import annotations

from ....protocol.checkpoint.vision.spec import MAX_SIDE, VisionSpec
from ....protocol.config.images.sized import QuartersProcessor
from ....protocol.config.images.tiles import DensePages, GridProcessor, PagesProcessor
from .fields import BICUBIC, BILINEAR, CLIP_VALUES, LANCZOS, side_of_tile
from .source import ProcessorSource


def quarters(source: ProcessorSource, vision: VisionSpec) -> QuartersProcessor:
    """Return the processor of Idefics2."""
    fields, size = source.fields, source.fields.first_section("size")
    shortest = size.integer("shortest_edge", 378, minimum=vision.patch_size, maximum=MAX_SIDE)
    return QuartersProcessor(
        **source.values(vision, BILINEAR),
        shortest=shortest,
        longest=size.integer("longest_edge", 980, minimum=shortest, maximum=MAX_SIDE),
        patch_size=vision.patch_size,
        splits=fields.boolean("do_image_splitting", False),
        joint="<fake_token_around_image>",
    )


def grid(source: ProcessorSource, vision: VisionSpec) -> GridProcessor:
    """Return the processor of Idefics3 or SmolVLM."""
    fields = source.fields
    side = side_of_tile(fields.first_section("max_image_size"), "longest_edge", vision)
    size = fields.first_section("size")
    size.require("height", None)
    return GridProcessor(
        **source.values(vision, LANCZOS),
        side=side,
        longest_edge=size.integer("longest_edge", 4 * side, maximum=MAX_SIDE),
        splits=fields.boolean("do_image_splitting", True),
    )


_MAX_TILES = 256


def pages(source: ProcessorSource, vision: VisionSpec) -> PagesProcessor:
    """Return the processor of Granite for Docling, on its coarse path, which is the default."""
    fields = source.fields
    fields.require("fine_route", False, default=False)
    splits = fields.boolean("crop_to_patches", True)
    least, most = source.tile_counts(1, 32, _MAX_TILES)
    dense: DensePages | None = None
    if count := fields.integer("dense_max_patches", 0, minimum=0, maximum=_MAX_TILES):
        names = ("dense_max_scale", "dense_min_aspect", "dense_max_aspect")
        dense = DensePages(max(count, least), *(fields.number(name, 0.0) for name in names))
    return PagesProcessor(
        **CLIP_VALUES | source.values(vision, BICUBIC),
        side=source.tile_side(vision),
        min_tiles=least if splits else 1,
        max_tiles=most if splits else 1,
        dense=dense,
    )
