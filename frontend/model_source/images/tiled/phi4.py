"""Read the image processors of Phi-3-Vision and Phi-4-multimodal."""

from __future__ import annotations

from .....protocol.checkpoint.vision.spec import VisionSpec
from .....protocol.config.images.tiles import BandsProcessor, CropsProcessor
from ..fields import BICUBIC, BILINEAR, CLIP_VALUES
from ..source import MAX_TILES, ProcessorSource


def crops(source: ProcessorSource, vision: VisionSpec) -> CropsProcessor:
    """Return the processor of Phi-4-multimodal, whose filter is that of the whole image."""
    fields = source.fields
    if fields.integer("resample", BICUBIC, minimum=0) != BICUBIC:
        raise fields.wrong("resample", f"{BICUBIC} (bicubic)", fields.get("resample"))
    patch_size = fields.integer("patch_size", vision.patch_size)
    if patch_size != vision.patch_size:
        needed = f"{vision.patch_size}, which is vision_config.patch_size"
        raise fields.wrong("patch_size", needed, patch_size)
    side = source.tile_side(vision)
    max_tiles = fields.integer("dynamic_hd", 36, maximum=MAX_TILES)
    per_tile = vision.num_outputs + side // (2 * patch_size)
    common = source.with_values({"resample": BILINEAR}).values(vision, BILINEAR)
    common["num_outputs"] = (max_tiles + 1) * per_tile + 1
    return CropsProcessor(**common, side=side, patch_size=patch_size, max_tiles=max_tiles)


def bands(source: ProcessorSource, vision: VisionSpec) -> BandsProcessor:
    """Return the processor of Phi-3-Vision and Phi-3.5-Vision."""
    fields, side = source.fields, vision.image_size
    max_tiles = fields.integer("num_crops", 16, maximum=MAX_TILES)
    row_length = side // (2 * vision.patch_size)
    # A single column has the most ends of rows.
    most = (max_tiles + 1) * row_length * (row_length + 1) + 1
    common = source.values(vision, BILINEAR) | {"num_outputs": most}
    return BandsProcessor(
        **CLIP_VALUES | common, side=side, row_length=row_length, max_tiles=max_tiles
    )
