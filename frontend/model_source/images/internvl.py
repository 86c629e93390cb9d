"""Read the image processor of InternVL."""

from __future__ import annotations

from typing import Final

from ....protocol.checkpoint.vision.spec import VisionSpec
from ....protocol.config.images import CanvasProcessor
from .fields import BICUBIC, CLIP_VALUES, side_of_tile, sides, values
from .source import ProcessorSource

_MAX_TILES: Final = 64


def canvas(source: ProcessorSource, vision: VisionSpec, token_id: int) -> CanvasProcessor:
    """Return the processor of InternVL."""
    fields = source.fields
    common = values(fields, vision, token_id, BICUBIC)
    common = CLIP_VALUES | common
    min_tiles = fields.integer("min_patches", 1, maximum=_MAX_TILES)
    return CanvasProcessor(
        **common,
        side=side_of_tile(sides(fields, "size"), "height", vision),
        splits=fields.boolean("crop_to_patches", True),
        min_tiles=min_tiles,
        max_tiles=fields.integer("max_patches", 12, minimum=min_tiles, maximum=_MAX_TILES),
        start="<img>",
        end="</img>",
    )
