"""Read the image processor of Muse Glimmer."""

from __future__ import annotations

from typing import Final

from ....protocol.checkpoint.vision.grid import GridVisionSpec
from ....protocol.config.images.sized import RatioProcessor
from .fields import LANCZOS
from .qwen import check_patches
from .source import ProcessorSource

_START: Final = "<|image_start|>"
_END: Final = "<|image_end|>"
"""Tokens that transformers' processor names itself, so that no file has their names."""


def muse(source: ProcessorSource, vision: GridVisionSpec) -> RatioProcessor:
    """Return the processor of Muse Glimmer or Muse Spark."""
    fields = source.fields
    check_patches(fields, vision)
    return RatioProcessor(
        **source.pixel_values(LANCZOS),
        output_size=vision.output_size,
        num_outputs=fields.integer("max_image_tokens", 4096, maximum=1 << 20),
        side_factor=vision.unit,
        start=_START,
        end=_END,
    )
