"""Turns an image into what takes its place in a prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from PIL import Image

from ...protocol.config.images import (
    AnyImageProcessor,
    CanvasProcessor,
    CropProcessor,
    GridProcessor,
    SquareProcessor,
)
from .layouts.grids import canvas, grid
from .layouts.pixels import Parts
from .layouts.single import crop, square

_LAYOUTS: Final[dict[type[Any], Callable[[Image.Image, Any], Parts]]] = {
    CanvasProcessor: canvas,
    CropProcessor: crop,
    GridProcessor: grid,
    SquareProcessor: square,
}


def process_image(image: Image.Image, config: AnyImageProcessor) -> Parts:
    """Return what takes the place of an image in RGB: texts and tiles in their order."""
    parts = _LAYOUTS[type(config)](image, config)
    return [config.start, *parts, config.end]
