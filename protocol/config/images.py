"""Image preprocessing settings of a model: one class for each way to resize an image and cut it into tiles."""

from __future__ import annotations

import enum
from typing import Final, Literal, TypeAlias

import msgspec

MAX_RATIO: Final = 200
"""Maximum aspect ratio of images of any size: the longer side divided by the shorter one."""
Background: TypeAlias = Literal["white", "checkers"]


class SpanKind(enum.Enum):
    """The spans of tokens that attend to each other in both directions.

    `IMAGE`: the tokens of one image, within the layer's window. `IMAGE_IN_WINDOWS`: the same, but only in layers with a
    sliding window. `WHOLE_IMAGE`: the tokens of one image, also beyond the window. `PROMPT`: all tokens of the prompt,
    also beyond the window.
    """

    IMAGE = "image"
    IMAGE_IN_WINDOWS = "image in windows"
    WHOLE_IMAGE = "whole image"
    PROMPT = "prompt"


class ImageProcessorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that all image processors share.

    Attributes:
        token_id: The placeholder token. The embeddings of an image replace the embeddings of this token.
        output_size: The number of elements of an embedding, including the parts that are added after the decoder's
            first layers (DeepStack).
        num_outputs: The number of embeddings per tile; the maximum per image if it depends on the image's size.
        resample: The resampling filter, as a value of Pillow's `Resampling`.
        mark: The text that represents an image in prompts; if empty, the text of `token_id`.
        start: The text before an image, or before each tile if all tiles are alike.
        end: The text after an image or tile with `start`.
        number_start: The text before the number of an image in its prompt, counted from 0, which precedes the image. If
            it is empty, images are not numbered.
        number_end: The text after the number.
        joint: The text between images or their tiles. Two in a row become one, and a space follows it before a word.
        mark_ids: Tokens around an image, or in it, whose embeddings the encoder computes, too.
        mark_texts: The texts of these tokens.
        after_images: The text after the last image. Prompts with it have all of their images at the beginning.
        prompt_end: The text at the end of a prompt with images.
        stands_alone: True if a request has one image instead of a text, because the model embeds both separately.
        background: The color behind transparent pixels: white, or squares of 8 pixels in two grays (Inkling 2).
        scale: The factor that pixel values (0 to 255) are multiplied by.
        mean: The mean of each channel, which is subtracted from the scaled values.
        std: The standard deviation of each channel, by which the differences are divided.
    """

    token_id: int
    output_size: int
    num_outputs: int
    resample: int
    mark: str = ""
    start: str = ""
    end: str = ""
    number_start: str = ""
    number_end: str = ""
    joint: str = ""
    mark_ids: tuple[int, ...] = ()
    mark_texts: tuple[str, ...] = ()
    after_images: str = ""
    prompt_end: str = ""
    stands_alone: bool = False
    background: Background = "white"
    scale: float = 1 / 255
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)


class SquareProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="square"):
    """Resizes an image to one tile of `side` x `side` pixels. The marks follow the embeddings of the image."""

    side: int


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
    fine: MarginProcessor | None = None


class GridProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="grid"):
    """Resizes both sides of an image to multiples of a tile's side, splits it, and adds a small copy of it.

    Before that, the longer side is resized to `longest_edge` pixels. If `splits` is false, only the small copy is used.
    """

    side: int
    longest_edge: int
    splits: bool = True


class CanvasProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="canvas"):
    """Splits an image into a grid of tiles with a similar aspect ratio, and adds a small copy of the whole image.

    The grid has `min_tiles` to `max_tiles` tiles of `side` x `side` pixels. If `least_scale` is true, the grid is
    chosen for the smallest change of scale instead. If `splits` is false, only the small copy is used. In the prompt, a
    tile follows `tile_label` and its number, the whole image follows `whole_label`, and each is followed by `tile_end`.
    If `has_whole_first` is true, the grid enlarges the image most, and tiles follow the copy (Perception LM).
    """

    side: int
    splits: bool = True
    min_tiles: int = 1
    max_tiles: int = 1
    least_scale: bool = False
    has_whole_first: bool = False
    tile_label: str = ""
    whole_label: str = ""
    tile_end: str = ""


class DensePages(msgspec.Struct, frozen=True):
    """The pages with small text, which have up to `max_tiles` tiles. The limits but the first are off if they are 0.

    Their width divided by the height is above `min_aspect`, and at most `max_aspect`. With the usual number of tiles,
    their width would be scaled by less than `max_scale`.
    """

    max_tiles: int
    max_scale: float = 0.0
    min_aspect: float = 0.0
    max_aspect: float = 0.0


class PagesProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="pages"):
    """Splits an image into a grid of tiles with a similar aspect ratio, and adds a copy of the whole to several tiles.

    The grid has `min_tiles` to `max_tiles` tiles of `side` x `side` pixels, at most 16 in each direction. In the
    prompt, each tile follows its name.
    """

    side: int
    min_tiles: int = 1
    max_tiles: int = 1
    dense: DensePages | None = None


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


class FitProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="fit"):
    """Shrinks an image into `max_width` x `max_height` pixels, and rounds its sides to multiples of `side_factor`.

    Each square of `output_side` pixels (`side_factor` if that is 0) makes one embedding. `row_end` is the text after
    each row of embeddings but the last.
    """

    max_width: int
    max_height: int
    side_factor: int
    output_side: int = 0
    row_end: str = ""


class BudgetProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="budget"):
    """Resizes an image so that it has at most `num_outputs` squares of `side_factor` x `side_factor` pixels.

    Each square makes one embedding.
    """

    side_factor: int


class QuartersProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="quarters"):
    """Shrinks an image so that its longer side has at most `longest` pixels, then enlarges sides below `shortest`.

    If `splits` is true, this is done with each quarter of the image, too, which precede the whole. Pixels at the right
    and at the bottom that make no whole square of `patch_size` x `patch_size` are left out. The text `joint` is before
    and after each of them.
    """

    shortest: int
    longest: int
    patch_size: int
    splits: bool = False


class RatioProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="ratio"):
    """Rounds an image to whole squares of `side_factor` x `side_factor` pixels, keeping its aspect ratio best.

    It is shrunk first if it has more than `num_outputs` squares. Each square makes one embedding.
    """

    side_factor: int


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
    `slice_start` and `slice_end`. If `max_slices` is 1, no slices are added. If `newline_id`, the token between rows of
    slices, is given, tokens have rotary positions on one canvas (MiniCPM-V 4.7).
    """

    side: int
    unit: int
    max_slices: int
    slice_start: str = ""
    slice_end: str = ""
    newline_id: int | None = None
    has_equal_counts: bool = False


class PadProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="pad"):
    """Shrinks an image to at most `max_patches` patches, and pads it with black at the right and at the bottom.

    Each side has at most `max_side` patches of `patch_size` pixels before the padding, and is a multiple of `unit`
    pixels after it. Each square of `unit` x `unit` pixels makes one embedding.
    """

    unit: int
    patch_size: int
    max_patches: int
    max_side: int


class CoverProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="cover"):
    """Splits an image into the smallest grid of tiles that keeps most of its pixels, after the whole image.

    Tiles have `side` x `side` pixels, and there are at most `max_tiles`. If `covers` is false, the grid is the one with
    `min_tiles` to `max_tiles` tiles whose aspect ratio is closest to the image's. If `splits` is false, there is only
    the whole image. An image has marks: before the whole image, after it, between the tiles of a row, between rows, and
    at the end. Their tokens are `mark_ids`, and their texts `mark_texts`. The encoder computes their embeddings, too.
    """

    side: int
    splits: bool = True
    covers: bool = True
    min_tiles: int = 1
    max_tiles: int = 1


class AnyresProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="anyres"):
    """Enlarges an image to the best of `grids`, pads it with black, splits it into tiles, and adds the whole image.

    A grid is a number of columns and rows of tiles. A tile has `side` x `side` pixels and `num_patches` x `num_patches`
    embeddings. The embeddings of the padding are dropped, and each row ends with a learned embedding. If `max_tiles` is
    not 0, the embeddings are downsampled to about the number that this many tiles have. If `pads_several` is true, the
    images of a prompt with several images are not split: they are padded to squares with the mean color.
    """

    side: int
    grids: tuple[tuple[int, int], ...]
    num_patches: int
    max_tiles: int = 0
    pads_several: bool = False


class RowsProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="rows"):
    """Enlarges an image to the best of `grids`, with margins, and splits it into tiles after the whole image.

    A grid is a number of columns and rows of tiles. A tile has `side` x `side` pixels and `row_length` rows of
    embeddings. There is one more embedding after each row and between the whole and the grid. Margins have the color
    `margin`. If a prompt has more than `max_split` images, their grids have one tile (DeepSeek-VL2).
    """

    side: int
    grids: tuple[tuple[int, int], ...]
    row_length: int
    margin: tuple[int, int, int]
    max_split: int


class TilesProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="tiles"):
    """Splits an image into up to `max_tiles` tiles, so that it shrinks as little as possible, and adds the whole image.

    The image is placed at the top left of the grid's canvas. Tiles have `side` x `side` pixels. If `fills` is true,
    images are enlarged as far as the canvas allows. In the prompt, `column_end` separates the tiles of a row, `row_end`
    ends each row, and `mark` precedes the whole image.
    """

    side: int
    max_tiles: int
    fills: bool = False
    column_end: str = ""
    row_end: str = ""


class MosaicProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="mosaic"):
    """Splits an image into up to `max_tiles` tiles, so that it shrinks as little as possible, for cross attention.

    The image is placed at the top left of a black canvas, and the encoder reads all tiles of `side` x `side` pixels
    together. `num_outputs` is the number of embeddings of `max_tiles` tiles. The prompt has one token for the image.
    """

    side: int
    max_tiles: int


class ResizeProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="resize"):
    """Resizes an image so that its sides are multiples of `unit` and it has `min_pixels` to `max_pixels` pixels.

    Each square of `unit` x `unit` pixels makes one embedding. If `grows` is not None, an image with a side below `unit`
    pixels is first enlarged until that side has `unit` pixels; the other side is then rounded down ("floor", GLM) or to
    the nearest integer ("round", PaddleOCR-VL). With "scaled" (Isaac), the image is scaled and its sides rounded up. If
    `newlines` is "plain" (Hy4-VL) or "framed" (Hunyuan-OCR), there is one more embedding after each row, and if it is
    "framed" or "ends" (Ovis 2.5), one before the image and one after it. If `size_end` is not empty, the numbers of
    rows and columns and this text follow `start`, and `row_end` each row but the last (Apertus 1.5). If `patch_size` is
    not 0, sides are first rounded up to patches (Nemotron Omni). Limits of requests count the pixels of
    `counted_frames` frames (GLM).
    """

    unit: int
    min_pixels: int
    max_pixels: int
    counted_frames: int = 1
    patch_size: int = 0
    grows: Literal["floor", "round", "scaled"] | None = None
    newlines: Literal["framed", "plain", "ends"] | None = None
    size_end: str = ""
    row_end: str = ""


class LongestProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="longest"):
    """Resizes the longer side of an image to `side` pixels, and the shorter one to at least `least` pixels.

    The image is placed at the top left of a black square.
    """

    side: int
    least: int


class CornerProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="corner"):
    """Places an image at the top left of a black canvas, whose sides are the smallest sufficient multiples of `unit`.

    Each square of `unit` x `unit` pixels makes one embedding. An image with more than `num_outputs` of them is shrunk,
    and one with fewer than `min_outputs` is enlarged.
    """

    unit: int
    min_outputs: int


class CropsProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="crops"):
    """Enlarges an image into a canvas of up to `max_tiles` tiles of `side` x `side` pixels, at its top left.

    The canvas has as many tiles as the image fills; if these are too many, the grid with the closest aspect ratio. The
    rest of it is white. Two patches of `patch_size` pixels in each direction make one embedding if the first of them is
    no margin. There is one more embedding after each row and before the small copy of the canvas, which follows.
    """

    side: int
    patch_size: int
    max_tiles: int


class BandsProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="bands"):
    """Resizes the longer side of an image to as many tiles as possible, of which there are up to `max_tiles`.

    White margins at both ends of the shorter side complete the tiles, which have `side` x `side` pixels and
    `row_length` rows of embeddings. There is one more embedding after each row and before the small copy of the canvas,
    which follows.
    """

    side: int
    row_length: int
    max_tiles: int


class OverlapsProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="overlaps"):
    """Resizes an image to one tile, and to a canvas of up to `max_tiles` tiles, which overlap.

    Tiles have `side` x `side` pixels, and neighbors are `window` pixels apart. Squares of `unit` x `unit` pixels make
    one embedding, also at the edges. Rows end with a token of their own: those of the canvas if `ends_rows`, and those
    of the whole image if `ends_whole_rows`. The marks are the tokens at the end of a row, at the start of the whole
    image, at the start of the canvas, and at the end of both. An image is the only one of its prompt.
    """

    side: int
    window: int
    unit: int
    max_tiles: int
    ends_rows: bool = True
    ends_whole_rows: bool = True


class ViewsProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="views"):
    """Splits a large image into a grid of tiles with a similar aspect ratio, and adds the whole image.

    Only images with a side above `side` pixels are split, if `splits` is true. The grid has `min_tiles` to `max_tiles`
    tiles of `side` x `side` pixels. The whole image follows in the middle of a square of `whole_side` pixels with the
    color `margin`. Each square of `unit` x `unit` pixels makes one embedding, and there is one more after the whole. If
    `has_rows` is true, there is also one after each row, and the tiles are one encoder input (DeepSeek-OCR).
    """

    side: int
    whole_side: int
    unit: int
    splits: bool = True
    min_tiles: int = 1
    max_tiles: int = 1
    margin: tuple[int, int, int] = (0, 0, 0)
    has_rows: bool = False


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
    | PagesProcessor
    | PanScanProcessor
    | QuartersProcessor
    | FitProcessor
    | BudgetProcessor
    | RatioProcessor
    | AnyresProcessor
    | RowsProcessor
    | PadProcessor
    | ThumbnailProcessor
    | LongestProcessor
    | ResizeProcessor
    | SlicesProcessor
    | TilesProcessor
    | ViewsProcessor
)
