"""Read the image processors of MiniCPM-V and MiniCPM-OCR."""

from __future__ import annotations

import math
from typing import Final

from .....protocol.checkpoint.vision.spec import MAX_SIDE, VisionSpec
from .....protocol.checkpoint.vision.tiled.minicpm import check_version
from .....protocol.config.images.details import SlicesProcessor
from ..fields import BICUBIC
from ..source import ProcessorSource

_MAX_SLICES: Final = 64


def slices(source: ProcessorSource, vision: VisionSpec) -> SlicesProcessor:
    """Return the processor of MiniCPM-V."""
    fields, unit = source.fields, vision.side_factor
    fields.require("patch_size", vision.patch_size, ", as in config.json")
    mode = "16x" if vision.window_layer else "4x"
    if (upsize := fields.text("small_image_upsize", "always")) != "always":
        raise fields.wrong("small_image_upsize", "'always'", upsize)
    fields.require("downsample_mode", mode, ", as in config.json")
    side = fields.integer("scale_resolution", 448, minimum=unit, maximum=MAX_SIDE)
    splits = fields.boolean("slice_mode", True)
    max_slices = fields.integer("max_slice_nums", 9, maximum=_MAX_SLICES) if splits else 1
    is_numbered = fields.boolean("use_image_id", True)

    newline_id: int | None = None
    if vision.has_axes:
        if not is_numbered:
            raise fields.wrong("use_image_id", "true", False)
        newline_id = source.config.integer("newline_id", minimum=0)
    units = side / unit
    # Sides are rounded to whole units. Together they are longest for the most oblong images, 200 to 1.
    most = math.ceil(units**2 + 14.3 * units) + 2

    def token(name: str) -> str:
        return source.special_token(f"{name}_token")

    return SlicesProcessor(
        **source.values(vision, BICUBIC) | {"num_outputs": most},
        side=side,
        unit=unit,
        max_slices=max_slices,
        start=token("image_start"),
        end=token("image_end"),
        number_start=token("image_id_start") if is_numbered else "",
        number_end=token("image_id_end") if is_numbered else "",
        slice_start=token("slice_start") if splits else "",
        slice_end=token("slice_end") if splits else "",
        newline_id=newline_id,
    )


def slices_of_queries(source: ProcessorSource, vision: VisionSpec) -> SlicesProcessor:
    """Return the processor of MiniCPM-V 2.5, 2.6, 4 and 4.5, whose own file names the marks of its prompts."""
    fields, config, unit = source.fields, source.config, vision.patch_size
    fields.require("patch_size", unit, ", as in config.json")
    fields.require("image_feature_size", vision.max_outputs, ", as query_num in config.json")
    splits = fields.boolean("slice_mode", config.boolean("slice_mode", True))
    is_numbered = fields.boolean("use_image_id", config.boolean("use_image_id", False))
    statistics = {f"image_{name}": fields.get(f"norm_{name}") for name in ("mean", "std")}
    common = source.with_values(statistics).values(vision, BICUBIC)
    start, end = fields.text("im_start", "<image>"), fields.text("im_end", "</image>")
    marks = fields.text("slice_start", "<slice>"), fields.text("slice_end", "</slice>")
    # In version 2.5, a slice has the marks of an image, and the marks of slices are around all of them.
    of_slice, of_slices = marks, ("", "")
    if check_version(config) == "2.5":
        of_slice, of_slices = (start, end), marks
    return SlicesProcessor(
        **common,
        mark="(<image>./</image>)",
        side=fields.integer("scale_resolution", 448, minimum=unit, maximum=MAX_SIDE),
        unit=unit,
        max_slices=fields.integer("max_slice_nums", 9, maximum=_MAX_SLICES) if splits else 1,
        has_equal_counts=True,
        start=start,
        end=end,
        number_start=fields.text("im_id_start", "<image_id>") if is_numbered else "",
        number_end=fields.text("im_id_end", "</image_id>") if is_numbered else "",
        slice_start=of_slice[0],
        slice_end=of_slice[1],
        slices_start=of_slices[0],
        slices_end=of_slices[1],
    )
