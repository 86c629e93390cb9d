"""Read the image processors of Janus and DeepSeek-VL, which give images margins."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.vision.spec import VisionSpec
from ....protocol.config.images.single import MarginProcessor
from .fields import BICUBIC, CLIP_VALUES, sides
from .source import ProcessorSource


def margins(source: ProcessorSource, vision: VisionSpec) -> MarginProcessor:
    """Return the processor of DeepSeek-VL."""
    fields = source.fields
    fields.require("do_pad", True)
    common = CLIP_VALUES | source.values(vision, BICUBIC)
    side = source.tile_side(vision)
    return _processor(fields, common, side)


def margins_with_copy(source: ProcessorSource, vision: VisionSpec) -> MarginProcessor:
    """Return the processor of DeepSeek-VL 7B, which also makes a larger copy of an image."""
    assert vision.fine is not None
    fields = source.fields
    names = ("size", "resample", "image_mean", "image_std")
    fine = source.with_values({name: fields.get(f"high_res_{name}") for name in names})
    size = sides(fields, "high_res_size")
    side = size.integer("height", vision.fine.image_size)
    if side != vision.fine.image_size:
        raise size.wrong(
            "height", f"{vision.fine.image_size}, which is high_res_vision_config.image_size", side
        )
    common = CLIP_VALUES | fine.values(vision, BICUBIC)
    return replace(margins(source, vision), fine=_processor(fine.fields, common, side))


def _processor(fields: ConfigFields, common: dict[str, Any], side: int) -> MarginProcessor:
    red, green, blue = (int(255 * mean) for mean in common["mean"])
    return MarginProcessor(
        **common,
        side=side,
        min_side=fields.integer("min_size", 14, maximum=side),
        margin=(red, green, blue),
    )


def margins_between_marks(source: ProcessorSource, vision: VisionSpec) -> MarginProcessor:
    """Return the processor of Janus, whose images are between two tokens."""
    marks = {"boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"}
    start, end = (source.special_token(name, text) for name, text in marks.items())
    return replace(margins(source, vision), start=start, end=end)
