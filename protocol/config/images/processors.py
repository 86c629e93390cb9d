"""All kinds of settings of image processors."""

from typing import TypeAlias

from .details import (
    CutsProcessor,
    PanScanProcessor,
    SlicesProcessor,
    ThumbnailProcessor,
    ViewsProcessor,
)
from .single import CropProcessor, LongestProcessor, MarginProcessor, PageProcessor, SquareProcessor
from .sized import (
    BudgetProcessor,
    CornerProcessor,
    FitProcessor,
    PadProcessor,
    PatchesProcessor,
    QuartersProcessor,
    RatioProcessor,
    ResizeProcessor,
)
from .tiles import (
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

AnyImageProcessor: TypeAlias = (
    SquareProcessor
    | CornerProcessor
    | CoverProcessor
    | CropProcessor
    | CropsProcessor
    | CutsProcessor
    | BandsProcessor
    | GridProcessor
    | MarginProcessor
    | MosaicProcessor
    | OverlapsProcessor
    | CanvasProcessor
    | PageProcessor
    | PagesProcessor
    | PanScanProcessor
    | QuartersProcessor
    | FitProcessor
    | BudgetProcessor
    | RatioProcessor
    | AnyresProcessor
    | RowsProcessor
    | PadProcessor
    | PatchesProcessor
    | ThumbnailProcessor
    | LongestProcessor
    | ResizeProcessor
    | SlicesProcessor
    | TilesProcessor
    | ViewsProcessor
    | WindowsProcessor
)
