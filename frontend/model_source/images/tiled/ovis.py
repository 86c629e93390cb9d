"""Read the image processor of Ovis 2."""

from __future__ import annotations

from typing import Final

from .....protocol.checkpoint.vision.spec import VisionSpec
from .....protocol.checkpoint.vision.tiled.ovis import NUM_MARKS
from .....protocol.config.images import CoverProcessor
from ..fields import BICUBIC, CLIP_VALUES, side_of_tile, sides, values
from ..source import ProcessorSource

_MAX_TILES: Final = 64
_MARKS: Final = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")


def cover(source: ProcessorSource, vision: VisionSpec, token_id: int) -> CoverProcessor:
    """Return the processor of Ovis 2."""
    fields, config = source.fields, source.config
    name = "visual_indicator_token_ids"
    ids = config.get(name, list(range(151666, 151666 + NUM_MARKS)))
    if not isinstance(ids, list) or len(ids) != NUM_MARKS or not all(type(i) is int for i in ids):
        raise config.wrong(name, f"{NUM_MARKS} token ids", ids)
    min_tiles = fields.integer("min_patches", 1, maximum=_MAX_TILES)
    return CoverProcessor(
        **CLIP_VALUES | values(fields, vision, token_id, BICUBIC),
        side=side_of_tile(sides(fields, "size"), "height", vision),
        splits=fields.boolean("crop_to_patches", False),
        covers=fields.boolean("use_covering_area_grid", True),
        min_tiles=min_tiles,
        max_tiles=fields.integer("max_patches", 12, minimum=min_tiles, maximum=_MAX_TILES),
        mark="<image>",
        mark_ids=tuple(ids),
        mark_texts=_MARKS,
    )
