"""Read the image processors of LLaVA-NeXT, LLaVA-OneVision and DeepSeek-VL2."""

from __future__ import annotations

import math
from typing import Final

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.vision.anyres import anyres_grid
from ....protocol.checkpoint.vision.spec import VisionSpec
from ....protocol.config.images.tiles import AnyresProcessor, RowsProcessor
from .fields import BICUBIC, CLIP_VALUES, side_of_tile, sides
from .source import ProcessorSource

_MAX_GRID_TILES: Final = 64


def anyres(source: ProcessorSource, vision: VisionSpec) -> AnyresProcessor:
    """Return the processor of LLaVA-NeXT, LLaVA-OneVision or Granite 4 Vision."""
    fields = source.fields
    size, crop = sides(fields, "size"), sides(fields, "crop_size")
    name = "height" if size.get("shortest_edge") is None else "shortest_edge"
    side = side_of_tile(size, name, vision)
    if crop.config:
        side_of_tile(crop, "height", vision)
    grids = _grids(fields.with_defaults(**source.config.config), "image_grid_pinpoints", side)
    # A class token may count, too.
    num_patches = math.isqrt(vision.num_outputs)
    most = max(anyres_grid(grid, grid, num_patches, vision.max_tiles).num_outputs for grid in grids)
    common = CLIP_VALUES | source.values(vision, BICUBIC)
    # A grid whose padding is dropped needs less reduction.
    reduced = round(1.21 * vision.max_tiles * num_patches**2) + num_patches * len(grids)
    common["num_outputs"] = vision.num_outputs + (max(most, reduced) if vision.max_tiles else most)
    return AnyresProcessor(
        **common,
        side=side,
        grids=grids,
        num_patches=num_patches,
        max_tiles=vision.max_tiles,
        pads_several=bool(vision.max_tiles),
    )


def rows(source: ProcessorSource, vision: VisionSpec) -> RowsProcessor:
    """Return the processor of DeepSeek-VL2, whose margins have the mean color."""
    side = vision.image_size
    sizes = source.config.with_defaults(candidate_resolutions=[[side, side]])
    # The sizes are given as (width, height).
    grids = tuple((x, y) for y, x in _grids(sizes, "candidate_resolutions", side))
    common = source.values(vision, BICUBIC)
    length = math.isqrt(vision.num_outputs)
    most = max(y * length * (x * length + 1) for x, y in grids)
    mean = common.get("mean", (0.5,) * 3)
    return RowsProcessor(
        **common | {"num_outputs": length * (length + 1) + 1 + most},
        side=side,
        grids=grids,
        row_length=length,
        margin=(int(mean[0] * 255), int(mean[1] * 255), int(mean[2] * 255)),
        max_split=2,
    )


def _grids(fields: ConfigFields, name: str, side: int) -> tuple[tuple[int, int], ...]:
    """Return the (columns, rows) of the grids, which the file gives as (height, width) in pixels."""
    sizes = fields.get(name)
    grids = []
    for size in sizes if isinstance(sizes, list) else ():
        if not isinstance(size, list) or len(size) != 2 or not all(type(x) is int for x in size):
            break
        height, width = size
        columns, rows = width // side, height // side
        if width % side or height % side or not 0 < columns * rows <= _MAX_GRID_TILES:
            break
        grids.append((columns, rows))
    else:
        if grids:
            return tuple(grids)
    needed = f"heights and widths that are multiples of {side}, of at most {_MAX_GRID_TILES} tiles"
    raise fields.wrong(name, needed, sizes)
