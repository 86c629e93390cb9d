"""Read the image processors of Aya Vision and Command A Vision."""

from __future__ import annotations

import msgspec

from .....protocol.checkpoint.vision.spec import VisionSpec
from .....protocol.config.images.tiles import CanvasProcessor
from ..source import ProcessorSource
from .internvl import canvas


def aya_vision(source: ProcessorSource, vision: VisionSpec) -> CanvasProcessor:
    """Return the processor of Aya Vision, which puts a name before each tile."""
    return msgspec.structs.replace(
        canvas(source, vision),
        mark="<image>",
        start="<|START_OF_IMG|>",
        end="<|END_OF_IMG|>",
        tile_label="TILE_{}",
        whole_label="TILE_GLOBAL",
    )


def cohere2_vision(source: ProcessorSource, vision: VisionSpec) -> CanvasProcessor:
    """Return the processor of Command A Vision, which puts a token after each tile."""
    return msgspec.structs.replace(
        canvas(source, vision),
        min_tiles=1,
        least_scale=True,
        start=source.special_token("boi_token"),
        end=source.special_token("eoi_token"),
        tile_end=source.special_token("img_line_break_token"),
    )
