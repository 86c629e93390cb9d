"""Dispatch an image to the layout of the model's image processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace
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
from .layouts.sized import fit, fit_budget, fit_ratio
from .layouts.slices import slices
from .layouts.thumbnails import thumbnail
from .layouts.tiles import mosaic, tiles

_LAYOUTS: Final[dict[type[Any], Callable[[Image.Image, Any], Parts]]] = {
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
    PageProcessor: on_page,
    PagesProcessor: pages,
    PanScanProcessor: pan_and_scan,
    QuartersProcessor: quarters,
    RatioProcessor: fit_ratio,
    ResizeProcessor: resized,
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
    if isinstance(config, AnyresProcessor):
        return anyres(image, config, num_images)
    if isinstance(config, RowsProcessor):
        return tiles_with_rows(image, config, num_images)
    if config.is_required and num_images > 1:
        raise ValueError(f"it reads one image a prompt, not {num_images}")
    is_only = isinstance(config, OverlapsProcessor) and not config.pads
    is_page = isinstance(config, SquareProcessor) and config.is_read
    if num_images > 1 and (is_page or isinstance(config, PageProcessor)):
        raise ValueError(f"it reads one page a prompt, not {num_images}")
    if num_images > 1 and (is_only or isinstance(config, WindowsProcessor)):
        raise ValueError(
            f"it reads one image a prompt, not {num_images}, because the tokens of all images attend to each other"
        )
    if isinstance(config, CanvasProcessor) and config.is_double and num_images > 1:
        config = replace(config, is_double=False)
    if isinstance(config, CanvasProcessor) and config.splits_alone:
        is_alone = num_images == 1
        config = replace(config, splits=is_alone, tile_end="\n" * is_alone)
    if isinstance(config, ViewsProcessor) and config.splits_alone and num_images > 1:
        config = replace(config, splits=False)
    return _LAYOUTS[type(config)](image, config)
