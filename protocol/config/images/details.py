"""The settings of image processors that read a large image as a whole and in parts."""

from typing import Self

from msgspec.structs import replace

from .settings import ImageProcessorConfig


class PanScanProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="pan_scan"):
    """Resizes an image to one tile of `side` x `side` pixels, and if `scans` is true adds up to `max_crops` crops.

    Only images whose longer side is at least `min_ratio` times the shorter one are cropped. Both sides of a crop have
    at least `min_crop_side` pixels.
    """

    side: int
    scans: bool = False
    max_crops: int = 4
    min_crop_side: int = 256
    min_ratio: float = 1.2


class CutsProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="cuts"):
    """Resizes an image to one tile of `side` x `side` pixels, after squares that are cut from a large or a long one.

    An image with a longer side above `longest` pixels is shrunk, and a very narrow one is placed at the top left of a
    black square. The squares have `cut_side` pixels, or as many as the shorter side of a long image, and are resized to
    `cut_side` pixels; each makes `cut_outputs` embeddings. In the prompt, a square is between `cut_start` and
    `cut_end`, and `row_end` follows each row of them but the last.
    """

    side: int
    cut_side: int
    cut_outputs: int
    longest: int
    cut_start: str
    cut_end: str
    row_end: str


class ThumbnailProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="thumbnail"):
    """Resizes a small image, or splits a large one into tiles and adds a copy of the whole.

    A small image is resized so that its sides are multiples of `unit` pixels and it has `min_outputs` to `max_outputs`
    squares of `unit` x `unit` pixels. Each square makes one embedding. An image is large if it has more than
    `tolerance` times `max_outputs` squares after both sides are rounded (to at least `patch_size` pixels). A large
    image is split into the grid of `min_tiles` to `max_tiles` tiles of `side` x `side` pixels whose aspect ratio is
    closest to its own. If `adds_whole` is true, the text `before_whole` and the whole image follow the tiles.
    """

    unit: int
    patch_size: int
    min_outputs: int
    max_outputs: int
    side: int
    min_tiles: int
    max_tiles: int
    tolerance: float
    adds_whole: bool = True
    before_whole: str = ""


class SlicesProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="slices"):
    """Resizes an image to about `side` x `side` pixels, and adds up to `max_slices` slices of a large one.

    The grid of slices has an aspect ratio similar to the image's, and each slice about `side` x `side` pixels. Sides
    are multiples of `unit` pixels, and each square of `unit` x `unit` pixels makes one embedding. If `has_equal_counts`
    is true, each slice makes `num_outputs` embeddings instead (MiniCPM-V 2.6). In the prompt, a slice is between
    `slice_start` and `slice_end`, and all slices are between `slices_start` and `slices_end`. If `max_slices` is 1, no
    slices are added. If `newline_id`, the token between rows of slices, is given, tokens have rotary positions on one
    canvas (MiniCPM-V 4.7).
    """

    side: int
    unit: int
    max_slices: int
    slice_start: str = ""
    slice_end: str = ""
    slices_start: str = ""
    slices_end: str = ""
    newline_id: int | None = None
    has_equal_counts: bool = False


class ViewsProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="views"):
    """Splits a large image into a grid of tiles with a similar aspect ratio, and adds the whole image.

    Only images with a side above `side` pixels are split, if `splits` is true. The grid has `min_tiles` to `max_tiles`
    tiles of `side` x `side` pixels. The whole image follows in the middle of a square of `whole_side` pixels with the
    color `margin`. Each square of `unit` x `unit` pixels makes one embedding, and there is one more after the whole. If
    `has_rows` is true, there is also one after each row, and the tiles are one encoder input (DeepSeek-OCR). With
    `splits_alone`, only the single image of a prompt is split.
    """

    side: int
    whole_side: int
    unit: int
    splits: bool = True
    splits_alone: bool = False
    min_tiles: int = 1
    max_tiles: int = 1
    margin: tuple[int, int, int] = (0, 0, 0)
    has_rows: bool = False

    def among(self, num_images: int) -> Self:
        """Return the settings for an image whose prompt has `num_images` images."""
        return replace(self, splits=self.splits and not (self.splits_alone and num_images > 1))
