"""Read the image processor of LFM2-VL."""

from __future__ import annotations

from ....protocol.checkpoint.vision.grid import GridVisionSpec
from ....protocol.checkpoint.vision.spec import MAX_SIDE
from ....protocol.config.images.details import ThumbnailProcessor
from .fields import BILINEAR
from .source import MAX_TILES, ProcessorSource

_MAX_OUTPUTS = 1 << 16


def thumbnail(source: ProcessorSource, vision: GridVisionSpec) -> ThumbnailProcessor:
    """Return the processor of LFM2-VL."""
    fields, unit = source.fields, vision.unit
    for name, size in (
        ("encoder_patch_size", vision.patch_size),
        ("downsample_factor", vision.merge_size),
    ):
        fields.require(name, size, ", as in config.json")
    side = fields.integer("tile_size", 512, maximum=MAX_SIDE)
    if side % unit:
        raise fields.wrong("tile_size", f"a multiple of {unit}", side)
    splits = fields.boolean("do_image_splitting", True)
    min_tiles = fields.integer("min_tiles", 2, maximum=MAX_TILES) if splits else 1
    max_tiles = fields.integer("max_tiles", 10, minimum=min_tiles, maximum=MAX_TILES)
    max_outputs = fields.integer("max_image_tokens", 256, maximum=_MAX_OUTPUTS)
    return ThumbnailProcessor(
        **source.pixel_values(BILINEAR),
        output_size=vision.output_size,
        num_outputs=max(max_outputs, (side // unit) ** 2),
        unit=unit,
        patch_size=vision.patch_size,
        min_outputs=fields.integer("min_image_tokens", 64, maximum=max_outputs),
        max_outputs=max_outputs,
        side=side,
        min_tiles=min_tiles,
        max_tiles=max_tiles if splits else 1,
        tolerance=fields.positive("max_pixels_tolerance", 2.0),
        adds_whole=fields.boolean("use_thumbnail", True),
        start="<|image_start|>",
        end="<|image_end|>",
        before_whole="<|img_thumbnail|>",
    )
