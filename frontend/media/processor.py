"""Dispatch an image to the layout of the model's image processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from PIL import Image

from ...protocol.config.images.details import (
    CutsProcessor,
    PanScanProcessor,
    SlicesProcessor,
    ThumbnailProcessor,
    ViewsProcessor,
)
from ...protocol.config.images.processors import AnyImageProcessor
from ...protocol.config.images.single import (
    CropProcessor,
    LongestProcessor,
    MarginProcessor,
    PageProcessor,
    SquareProcessor,
)
from ...protocol.config.images.sized import (
    BudgetProcessor,
    CornerProcessor,
    FitProcessor,
    PadProcessor,
    PatchesProcessor,
    QuartersProcessor,
    RatioProcessor,
    ResizeProcessor,
)
from ...protocol.config.images.tiles import (
    AnyresProcessor,
    BandsProcessor,
    CanvasProcessor,
    CoverProcessor,
    CropsProcessor,
    GridProcessor,
    MosaicProcessor,
    OverlapsProcessor,
    PagesProcessor,
    RowsProcessor,
    TilesProcessor,
    WindowsProcessor,
)
from .layouts.anyres import anyres, tiles_with_rows
from .layouts.covers import cover
from .layouts.grids import bands, canvas, crops, grid, views
from .layouts.overlaps import overlaps, windows
from .layouts.pages import pages
from .layouts.pixels import Parts
from .layouts.resized import cornered, padded, resized
from .layouts.scans import cuts, pan_and_scan
from .layouts.single import crop, in_square, longest, on_page, quarters, square
from .layouts.sized import fit, fit_budget, fit_ratio, patches
from .layouts.slices import slices
from .layouts.thumbnails import thumbnail
from .layouts.tiles import mosaic, tiles

_LAYOUTS: Final[dict[type[Any], Callable[[Image.Image, Any], Parts]]] = {
    AnyresProcessor: anyres,
    BandsProcessor: bands,
    BudgetProcessor: fit_budget,
    CanvasProcessor: canvas,
    CornerProcessor: cornered,
    CoverProcessor: cover,
    CropProcessor: crop,
    CropsProcessor: crops,
    CutsProcessor: cuts,
    FitProcessor: fit,
    GridProcessor: grid,
    LongestProcessor: longest,
    MarginProcessor: in_square,
    MosaicProcessor: mosaic,
    OverlapsProcessor: overlaps,
    PadProcessor: padded,
    PatchesProcessor: patches,
    PageProcessor: on_page,
    PagesProcessor: pages,
    PanScanProcessor: pan_and_scan,
    QuartersProcessor: quarters,
    RatioProcessor: fit_ratio,
    ResizeProcessor: resized,
    RowsProcessor: tiles_with_rows,
    SlicesProcessor: slices,
    SquareProcessor: square,
    ThumbnailProcessor: thumbnail,
    TilesProcessor: tiles,
    ViewsProcessor: views,
    WindowsProcessor: windows,
}


def process_image(image: Image.Image, config: AnyImageProcessor, num_images: int = 1) -> Parts:
    """Return the texts and tiles that replace one of a prompt's images, which is given in RGB.

    Raises:
        ValueError: The model cannot read the image.
    """
    if config.max_images and num_images > config.max_images:
        limit = "one image" if config.max_images == 1 else f"at most {config.max_images} images"
        raise ValueError(f"it reads {limit} a prompt, not {num_images}")
    return _LAYOUTS[type(config)](image, config.among(num_images))
