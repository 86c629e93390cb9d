"""The configuration of a model that reads images: a class for each way to cut an image into tiles."""

from __future__ import annotations

import enum
from typing import Literal, TypeAlias

import msgspec


class SpanKind(enum.Enum):
    """The kind of spans whose tokens see each other.

    `IMAGE`: those of an image, within the layer's window. `IMAGE_IN_WINDOWS`: the same, but only in layers with a
    window. `PROMPT`: those of the prompt, also outside of the window.
    """

    IMAGE = "image"
    IMAGE_IN_WINDOWS = "image in windows"
    PROMPT = "prompt"


class ImageProcessorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The attributes that all image processors have.

    Attributes:
        token_id: The token whose embeddings an image's replace.
        output_size: The size of an embedding, with the parts that are added after the decoder's first layers.
        num_outputs: The embeddings of a tile, or the most of an image whose number depends on its size.
        resample: The filter, by Pillow's number.
        mark: The text that stands for an image in prompts; empty for that of `token_id`.
        start: The text before an image, or before each of several tiles of the same kind.
        end: The text after it.
        after_images: The text after the last image of a prompt, which no other text precedes.
        prompt_end: The text at the end of a prompt with images.
        scale: The factor on values from 0 to 255.
        mean: The mean of each channel, which is subtracted from these products.
        std: The divisor of each channel after that.
    """

    token_id: int
    output_size: int
    num_outputs: int
    resample: int
    mark: str = ""
    start: str = ""
    end: str = ""
    after_images: str = ""
    prompt_end: str = ""
    scale: float = 1 / 255
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)


class SquareProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="square"):
    """Resizes an image to a tile of `side` pixels."""

    side: int


class CropProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="crop"):
    """Resizes the shorter side to `shortest_edge` pixels, and takes a tile of `side` pixels from the middle."""

    side: int
    shortest_edge: int


class GridProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="grid"):
    """Resizes an image to a multiple of a tile in both directions, splits it, and adds a small copy of the whole.

    `longest_edge` is the longer side before that, in pixels. Images are only split if it `splits` them.
    """

    side: int
    longest_edge: int
    splits: bool = True


class CanvasProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="canvas"):
    """Resizes an image to the grid of tiles whose shape is most like its own, splits it, and adds the whole.

    The grid has `min_tiles` to `max_tiles` tiles. With `least_scale` it is instead that which shrinks the image least,
    or enlarges it least. Images are only split if it `splits` them. Tiles have numbered names that begin with
    `tile_label`, the whole that of `whole_label`, and each of them ends with `tile_end`.
    """

    side: int
    splits: bool = True
    min_tiles: int = 1
    max_tiles: int = 1
    least_scale: bool = False
    tile_label: str = ""
    whole_label: str = ""
    tile_end: str = ""


class PanScanProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="pan_scan"):
    """Resizes an image to a tile of `side` pixels, and with `scans` also up to `max_crops` parts of a long one.

    An image is long if its longer side is `min_ratio` times the other. Both sides of a part have at least
    `min_crop_side` pixels.
    """

    side: int
    scans: bool = False
    max_crops: int = 4
    min_crop_side: int = 256
    min_ratio: float = 1.2


class FitProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="fit"):
    """Shrinks an image until it fits into `max_width` x `max_height`, and resizes it to multiples of `side_factor`.

    Each square of `output_side` pixels, or of `side_factor` if that is 0, makes one embedding. `row_end` is the text
    between rows of these.
    """

    max_width: int
    max_height: int
    side_factor: int
    output_side: int = 0
    row_end: str = ""


class BudgetProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="budget"):
    """Resizes an image to multiples of `side_factor`, so that it has almost `num_outputs` squares of that side.

    Each of these squares makes one embedding.
    """

    side_factor: int


class ThumbnailProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="thumbnail"):
    """Resizes an image to multiples of `unit` pixels, with `min_outputs` to `max_outputs` squares of these.

    Each square makes one embedding. An image with more than `tolerance` times `max_outputs` squares, whose sides are
    rounded but have at least `patch_size` pixels, is resized to a grid of `min_tiles` to `max_tiles` tiles of `side`
    pixels, whose shape is most like its own, and split. With `adds_whole` the whole follows the tiles, after
    `before_whole`.
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


class PadProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="pad"):
    """Shrinks an image to at most `max_patches` patches, and adds black at the right and at the bottom.

    Both sides become multiples of `unit` pixels, whose squares make one embedding each, and have at most `max_side`
    patches of `patch_size` pixels before.
    """

    unit: int
    patch_size: int
    max_patches: int
    max_side: int


class AnyresProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="anyres"):
    """Enlarges an image to the best of `grids`, adds black margins, splits it into tiles, and adds the whole.

    Grids are columns and rows of tiles of `side` pixels, which have `num_patches` embeddings in each direction. The
    embeddings of margins are left out, and each row ends with a stored one. With `max_tiles` they are reduced until
    they are about as many as those of so many tiles. With `pads_several` images of a prompt with several are not split,
    but get margins of the mean color.
    """

    side: int
    grids: tuple[tuple[int, int], ...]
    num_patches: int
    max_tiles: int = 0
    pads_several: bool = False


class TilesProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="tiles"):
    """Puts an image on the canvas of up to `max_tiles` tiles that shrinks it least, splits that, and adds the whole.

    The image is at the top left. Tiles have `side` pixels in each direction. If the processor `fills` canvases, images
    are enlarged as far as possible. Tiles of a row are separated by `column_end`, and each row ends with `row_end`.
    `mark` comes before the whole image.
    """

    side: int
    max_tiles: int
    fills: bool = False
    column_end: str = ""
    row_end: str = ""


class ResizeProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="resize"):
    """Resizes an image to multiples of `unit` pixels, of which it has `min_pixels` to `max_pixels`.

    Each square of `unit` pixels is an embedding. Images with a side of fewer pixels are first enlarged to that if it
    `grows` them: the other side is rounded down ("floor", GLM) or to the nearest number ("round", PaddleOCR-VL).
    """

    unit: int
    min_pixels: int
    max_pixels: int
    grows: Literal["floor", "round"] | None = None


AnyImageProcessor: TypeAlias = (
    SquareProcessor
    | CropProcessor
    | GridProcessor
    | CanvasProcessor
    | PanScanProcessor
    | FitProcessor
    | BudgetProcessor
    | AnyresProcessor
    | PadProcessor
    | ThumbnailProcessor
    | ResizeProcessor
    | TilesProcessor
)
