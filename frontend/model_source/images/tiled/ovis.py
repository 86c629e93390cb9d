"""Read the image processor of Ovis 2."""

from __future__ import annotations

from typing import Final

from .....protocol.checkpoint.vision.spec import VisionSpec
from .....protocol.checkpoint.vision.tiled.ovis import NUM_MARKS
from .....protocol.config.images.tiles import CoverProcessor
from ..fields import BICUBIC, CLIP_VALUES
from ..source import ProcessorSource

_MARKS: Final = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")


def cover(source: ProcessorSource, vision: VisionSpec) -> CoverProcessor:
    """Return the processor of Ovis 2."""
    fields, config = source.fields, source.config
    name = "visual_indicator_token_ids"
    ids = config.get(name, list(range(151666, 151666 + NUM_MARKS)))
    if not isinstance(ids, list) or len(ids) != NUM_MARKS or not all(type(i) is int for i in ids):
        raise config.wrong(name, f"{NUM_MARKS} token ids", ids)
    min_tiles, max_tiles = source.tile_counts(1, 12)
    return CoverProcessor(
        **CLIP_VALUES | source.values(vision, BICUBIC),
        side=source.tile_side(vision),
        splits=fields.boolean("crop_to_patches", False),
        covers=fields.boolean("use_covering_area_grid", True),
        min_tiles=min_tiles,
        max_tiles=max_tiles,
        mark="<image>",
        mark_ids=tuple(ids),
        mark_texts=_MARKS,
    )
