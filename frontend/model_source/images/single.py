"""Reads the image processors of CLIP and SigLIP, which make one tile of an image."""

from __future__ import annotations

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.vision.spec import MAX_SIDE, VisionSpec
from ....protocol.config.images import CropProcessor, SquareProcessor
from .fields import BICUBIC, CLIP_VALUES, side_of_tile, sides, values


def single(
    fields: ConfigFields, config: ConfigFields, vision: VisionSpec, token_id: int
) -> SquareProcessor | CropProcessor:
    """Return the processor of CLIP or SigLIP."""
    common = values(fields, vision, token_id, BICUBIC)
    size, crop = sides(fields, "size"), sides(fields, "crop_size")
    if vision.has_class_token:
        common = CLIP_VALUES | common
    if size.get("shortest_edge") is None:
        side = side_of_tile(size, "height", vision)
        return SquareProcessor(**common, side=side)
    side = side_of_tile(crop, "height", vision)
    return CropProcessor(
        **common,
        side=side,
        shortest_edge=size.integer("shortest_edge", minimum=side, maximum=MAX_SIDE),
    )
