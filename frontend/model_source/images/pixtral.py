"""Reads the image processor of Pixtral and Mistral 3."""

from __future__ import annotations

from ....protocol.checkpoint.vision.spec import MAX_SIDE, VisionSpec
from ....protocol.config.images import FitProcessor
from .fields import BICUBIC, CLIP_VALUES, values
from .source import ProcessorSource


def pixtral(source: ProcessorSource, vision: VisionSpec, token_id: int) -> FitProcessor:
    """Return the processor of Pixtral or Mistral 3."""
    fields = source.fields
    size = fields.first_section("size")
    longest = size.integer("longest_edge", 1024, maximum=MAX_SIDE)
    width, height = (size.integer(name, longest, maximum=MAX_SIDE) for name in ("width", "height"))
    factor = vision.side_factor
    common = CLIP_VALUES | values(fields, vision, token_id, BICUBIC)
    common["num_outputs"] = -(-width // factor) * -(-height // factor)
    return FitProcessor(
        **common,
        max_width=width,
        max_height=height,
        side_factor=factor,
        row_end="[IMG_BREAK]",
        end="[IMG_END]",
    )
