"""Read the image processor of Step 3, Step 3.7 and Step3-VL 10B."""

from __future__ import annotations

from .....protocol.checkpoint.vision.grid import GridVisionSpec
from .....protocol.checkpoint.vision.spec import MAX_SIDE
from .....protocol.config.images.details import CutsProcessor
from ..fields import BILINEAR, CLIP_VALUES, sides
from ..source import ProcessorSource

_STRIDE = 4


def cuts(source: ProcessorSource, vision: GridVisionSpec) -> CutsProcessor:
    """Return the processor, whose marks of prompts are not in a file."""
    fields, unit = source.fields, vision.patch_size
    side = sides(fields, "size").integer("height", 728, minimum=unit, maximum=MAX_SIDE)
    cut = fields.integer("patch_size", 504, minimum=unit, maximum=MAX_SIDE)
    for name, length in (("size.height", side), ("patch_size", cut)):
        if length % (_STRIDE * unit):
            raise fields.wrong(name, f"a multiple of {_STRIDE * unit}", length)
    counts = [(length // unit // _STRIDE) ** 2 for length in (side, cut)]
    return CutsProcessor(
        **CLIP_VALUES | source.pixel_values(BILINEAR),
        output_size=vision.output_size,
        num_outputs=counts[0],
        side=side,
        cut_side=cut,
        cut_outputs=counts[1],
        longest=fields.integer("max_image_size", 3024, minimum=side, maximum=MAX_SIDE),
        start="<im_start>",
        end="<im_end>",
        cut_start="<patch_start>",
        cut_end="<patch_end>",
        row_end="<patch_newline>",
    )
