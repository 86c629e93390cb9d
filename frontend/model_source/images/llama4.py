"""Read the image processors of Llama 3.2 Vision and Llama 4."""

from __future__ import annotations

from ....protocol.checkpoint.vision.llama import TilesVisionSpec
from ....protocol.checkpoint.vision.spec import VisionSpec
from ....protocol.config.images.tiles import MosaicProcessor, TilesProcessor
from .fields import BILINEAR
from .source import MAX_TILES, ProcessorSource


def tiles(source: ProcessorSource, vision: VisionSpec) -> TilesProcessor:
    """Return the processor of Llama 4, which puts `<|image|>` before the embeddings of the whole image."""
    fields = source.fields
    side = source.tile_side(vision)
    return TilesProcessor(
        **source.values(vision, BILINEAR),
        side=side,
        max_tiles=fields.integer("max_patches", 16, maximum=MAX_TILES),
        fills=fields.boolean("resize_to_max_canvas", False),
        mark="<|image|>",
        start="<|image_start|>",
        end="<|image_end|>",
        column_end="<|tile_x_separator|>",
        row_end="<|tile_y_separator|>",
    )


def mosaic(source: ProcessorSource, vision: TilesVisionSpec) -> MosaicProcessor:
    """Return the processor of Llama 3.2 Vision."""
    fields = source.fields
    most = vision.max_tiles
    if fields.integer("max_image_tiles", most) != most:
        needed = f"{most}, which is vision_config.max_num_tiles"
        raise fields.wrong("max_image_tiles", needed, fields.get("max_image_tiles"))
    return MosaicProcessor(
        **source.values(vision, BILINEAR),
        side=source.tile_side(vision),
        max_tiles=most,
    )
