"""Read the image processor of Moondream, which has no file."""

from __future__ import annotations

from .....protocol.checkpoint.vision.tiled.moondream import WindowsVisionSpec
from .....protocol.config.images.tiles import WindowsProcessor
from ..fields import LANCZOS
from ..source import MAX_TILES, ProcessorSource


def windows(source: ProcessorSource, vision: WindowsVisionSpec) -> WindowsProcessor:
    """Return the processor, whose sizes are those of the vision tower."""
    return WindowsProcessor(
        **source.pixel_values(LANCZOS),
        output_size=vision.output_size,
        num_outputs=vision.num_outputs,
        max_images=1,
        side=vision.tower.image_size,
        window=vision.window * vision.tower.patch_size,
        max_tiles=source.fields.integer("max_crops", vision.max_tiles, maximum=MAX_TILES),
    )
