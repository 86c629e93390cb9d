"""The settings of image processors that divide an image into a grid of tiles."""

from typing import Self

import msgspec
from msgspec.structs import replace

from .settings import ImageProcessorConfig


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
    chosen for the smallest change of scale instead. If `counts_area` is true, larger grids are preferred until they
    have six tenths of the image's pixels (Eagle 2.5). If `splits` is false, only the small copy is used. In the prompt,
    a tile follows `tile_label`, in which its number replaces {}, the whole image follows `whole_label`, and each is
    followed by `tile_end`. If `is_double` is true, an image alone in its prompt is also split into a grid of at least 3
    tiles whose numbers of columns and rows do not divide those of the first grid, which precedes the others (H2OVL). If
    `splits_alone` is true, only an image alone in its prompt is split, and only its tiles are followed by `tile_end`
    (NVILA-Lite). If `has_whole_first` is true, the grid enlarges the image most, and tiles follow the copy (Perception
    LM).
    """

    side: int
    splits: bool = True
    min_tiles: int = 1
    max_tiles: int = 1
    least_scale: bool = False
    counts_area: bool = False
    has_whole_first: bool = False
    is_double: bool = False
    splits_alone: bool = False
    tile_label: str = ""
    whole_label: str = ""
    tile_end: str = ""

    def among(self, num_images: int) -> Self:
        """Return the settings for an image whose prompt has `num_images` images."""
        if num_images == 1:
            return self
        if self.splits_alone:
            return replace(self, splits=False, tile_end="")
        return replace(self, is_double=False)


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
    images of a prompt with several images are not split. If `splits` is false, an image is padded to a square with the
    mean color.
    """

    side: int
    grids: tuple[tuple[int, int], ...]
    num_patches: int
    max_tiles: int = 0
    pads_several: bool = False
    splits: bool = True

    def among(self, num_images: int) -> Self:
        """Return the settings for an image whose prompt has `num_images` images."""
        return replace(self, splits=not (self.pads_several and num_images > 1))


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

    def among(self, num_images: int) -> Self:
        """Return the settings for an image whose prompt has `num_images` images."""
        return self if num_images <= self.max_split else replace(self, grids=((1, 1),))


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
    image, at the start of the canvas, and at the end of both. If `pads`, images keep their shape, in the middle of
    black margins (Molmo 1).
    """

    side: int
    window: int
    unit: int
    max_tiles: int
    ends_rows: bool = True
    ends_whole_rows: bool = True
    pads: bool = False


class WindowsProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="windows"):
    """Resizes an image to one tile, and to a canvas of up to `max_tiles` tiles, which overlap (Moondream).

    Tiles have `side` x `side` pixels, and neighbors are `window` pixels apart. The canvas is about as wide, compared to
    its height, as the image.
    """

    side: int
    window: int
    max_tiles: int
