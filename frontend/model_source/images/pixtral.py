"""Read the image processors of Pixtral, Mistral 3 and LightOnOCR."""

from __future__ import annotations

import msgspec

from ....protocol.checkpoint.vision.spec import MAX_SIDE, VisionSpec
from ....protocol.config.images.sized import FitProcessor
from .fields import BICUBIC, CLIP_VALUES
from .source import ProcessorSource


def pixtral(source: ProcessorSource, vision: VisionSpec) -> FitProcessor:
    """Return the processor of Pixtral or Mistral 3."""
    fields = source.fields
    size = fields.first_section("size")
    longest = size.integer("longest_edge", 1024, maximum=MAX_SIDE)
    width, height = (size.integer(name, longest, maximum=MAX_SIDE) for name in ("width", "height"))
    factor = vision.side_factor
    common = CLIP_VALUES | source.values(vision, BICUBIC)
    common["num_outputs"] = -(-width // factor) * -(-height // factor)
    return FitProcessor(
        **common,
        max_width=width,
        max_height=height,
        side_factor=factor,
        row_end="[IMG_BREAK]",
        end="[IMG_END]",
    )


def lighton_ocr(source: ProcessorSource, vision: VisionSpec) -> FitProcessor:
    """Return the processor of LightOnOCR, whose images need not be whole multiples of the square of an embedding."""
    fields = source.fields
    side = fields.get("patch_size", 16)
    if isinstance(side, dict):
        side = side.get("height")
    factor = fields.with_values({"patch_size": side}).integer("patch_size", maximum=MAX_SIDE)
    if factor % vision.patch_size:
        raise fields.wrong("patch_size", f"a multiple of {vision.patch_size}", side)
    return msgspec.structs.replace(
        pixtral(source, vision),
        side_factor=factor,
        output_side=vision.side_factor,
        row_end="",
        end="",
    )
