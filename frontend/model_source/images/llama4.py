"""Read the image processor of Llama 4."""

from __future__ import annotations

from ....protocol.checkpoint.vision.spec import VisionSpec
from ....protocol.config.images import TilesProcessor
from .fields import BILINEAR, side_of_tile, sides, values
from .source import ProcessorSource

_MAX_TILES = 64


def tiles(source: ProcessorSource, vision: VisionSpec, token_id: int) -> TilesProcessor:
    """Return the processor of Llama 4, which puts `<|image|>` before the embeddings of the whole image."""
    fields = source.fields
    side = side_of_tile(sides(fields, "size"), "height", vision)
    return TilesProcessor(
        **values(fields, vision, token_id, BILINEAR),
        side=side,
        max_tiles=fields.integer("max_patches", 16, maximum=_MAX_TILES),
        fills=fields.boolean("resize_to_max_canvas", False),
        mark="<|image|>",
        start="<|image_start|>",
        end="<|image_end|>",
        column_end="<|tile_x_separator|>",
        row_end="<|tile_y_separator|>",
    )
