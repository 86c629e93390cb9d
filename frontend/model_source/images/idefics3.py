"""Read the image processors of Idefics3 and SmolVLM."""

from __future__ import annotations

from ....protocol.checkpoint.vision.spec import MAX_SIDE, VisionSpec
from ....protocol.config.images import GridProcessor
from .fields import LANCZOS, side_of_tile, values
from .source import ProcessorSource


def grid(source: ProcessorSource, vision: VisionSpec, token_id: int) -> GridProcessor:
    """Return the processor of Idefics3 or SmolVLM."""
    fields = source.fields
    side = side_of_tile(fields.first_section("max_image_size"), "longest_edge", vision)
    size = fields.first_section("size")
    return GridProcessor(
        **values(fields, vision, token_id, LANCZOS),
        side=side,
        longest_edge=size.integer("longest_edge", 4 * side, maximum=MAX_SIDE),
        splits=fields.boolean("do_image_splitting", True),
    )
