"""Read the image processor of Perception LM."""

from __future__ import annotations

from .....protocol.checkpoint.vision.spec import VisionSpec
from .....protocol.config.images.tiles import CanvasProcessor
from ..fields import BICUBIC, HALF_VALUES, side_of_tile
from ..source import MAX_TILES, ProcessorSource


def whole_first(source: ProcessorSource, vision: VisionSpec) -> CanvasProcessor:
    """Return the processor of Perception LM, which puts the whole image before its tiles."""
    fields = source.fields
    return CanvasProcessor(
        **HALF_VALUES | source.values(vision, BICUBIC),
        side=side_of_tile(fields, "tile_size", vision),
        splits=fields.text("vision_input_type", "thumb+tile") == "thumb+tile",
        max_tiles=fields.integer("max_num_tiles", 36, maximum=MAX_TILES),
        has_whole_first=True,
    )
