"""The settings of image processors that make one tile of an image."""

from .settings import ImageProcessorConfig


class SquareProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="square"):
    """Resizes an image to one tile of `side` x `side` pixels. The marks follow the embeddings of the image.

    If `pads` is true, the image is first placed in the middle of a square of the mean color. If `grid_side` is not 0,
    the embeddings are a grid with this side, which is one moment of the decoder's positions, between those of two
    marks (GLM-4V 9B). If `is_read`, cross attention reads them, and no token is replaced (TrOCR).
    """

    side: int
    pads: bool = False
    grid_side: int = 0
    is_read: bool = False


class CropProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="crop"):
    """Resizes the shorter side to `shortest_edge` pixels, and crops `side` x `side` pixels from the middle."""

    side: int
    shortest_edge: int


class MarginProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="margin"):
    """Resizes the longer side of an image to `side` pixels, and puts it in the middle of a square with a `margin`.

    The shorter side has at least `min_side` pixels. The margin is a color in RGB. If `fine` is not None, this is done
    with the larger square that `fine` makes of the image, and the model reads both (DeepSeek-VL 7B).
    """

    side: int
    min_side: int
    margin: tuple[int, int, int]
    fine: "MarginProcessor | None" = None


class LongestProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="longest"):
    """Resizes the longer side of an image to `side` pixels, and the shorter one to at least `least` pixels.

    The image is placed at the top left of a black square.
    """

    side: int
    least: int


class PageProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="page"):
    """Shrinks an image to at most `width` x `height` pixels, and puts it in the middle of a white page of this size.

    Cross attention reads the page, whose token is at the start of the prompt (Nemotron Parse). If `fills_width`, the
    shorter side of an image is first resized to that of the page, and margins are black (Donut). An image that is then
    too long is shrunk with the filter `shrink_resample`, unless that is None. If `crops_margins`, the light margins of
    an image are removed before (Nougat).
    """

    width: int
    height: int
    fills_width: bool = False
    shrink_resample: int | None = None
    crops_margins: bool = False
