"""The settings of image processors that keep the aspect ratio of an image, without tiles."""

from typing import Final, Literal

from .settings import ImageProcessorConfig

MAX_RATIO: Final = 200
"""Maximum aspect ratio of images of any size: the longer side divided by the shorter one."""


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


class RatioProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="ratio"):
    """Rounds an image to whole squares of `side_factor` x `side_factor` pixels, keeping its aspect ratio best.

    It is shrunk first if it has more than `num_outputs` squares. Each square makes one embedding.
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


class PadProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="pad"):
    """Shrinks an image to at most `max_patches` patches, and pads it with black at the right and at the bottom.

    Each side has at most `max_side` patches of `patch_size` pixels before the padding, and is a multiple of `unit`
    pixels after it. Each square of `unit` x `unit` pixels makes one embedding.
    """

    unit: int
    patch_size: int
    max_patches: int
    max_side: int


class ResizeProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="resize"):
    """Resizes an image so that its sides are multiples of `unit` and it has `min_pixels` to `max_pixels` pixels.

    Each square of `unit` x `unit` pixels makes one embedding. If `grows` is not None, an image with a side below `unit`
    pixels is first enlarged until that side has `unit` pixels; the other side is then rounded down ("floor", GLM) or to
    the nearest integer ("round", PaddleOCR-VL). With "scaled" (Isaac), the image is scaled and its sides rounded up;
    with "stepped" (Youtu-VL), too, but it is only shrunk, in steps of 2 %. If `newlines` is "plain" (Hy4-VL) or
    "framed" (Hunyuan-OCR), there is one more embedding after each row, and if it is "framed" or "ends" (Ovis 2.5), one
    before the image and one after it. If `size_end` is not empty, the numbers of rows and columns and this text follow
    `start`, and `row_end` each row but the last (Apertus 1.5). If `patch_size` is not 0, sides are first rounded up to
    patches (Nemotron Omni). Limits of requests count the pixels of `counted_frames` frames (GLM).
    """

    unit: int
    min_pixels: int
    max_pixels: int
    counted_frames: int = 1
    patch_size: int = 0
    grows: Literal["floor", "round", "scaled", "stepped"] | None = None
    newlines: Literal["framed", "plain", "ends"] | None = None
    size_end: str = ""
    row_end: str = ""


class CornerProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="corner"):
    """Places an image at the top left of a black canvas, whose sides are the smallest sufficient multiples of `unit`.

    Each square of `unit` x `unit` pixels makes one embedding. An image with more than `num_outputs` of them is shrunk,
    and one with fewer than `min_outputs` is enlarged.
    """

    unit: int
    min_outputs: int


class PatchesProcessor(ImageProcessorConfig, frozen=True, kw_only=True, tag="patches"):
    """Resizes an image to as many patches of `patch_size` x `patch_size` pixels as `max_patches` allows (Pix2Struct).

    Pixels are not rounded. Their mean and standard deviation are those of the image itself if `normalizes`. Cross
    attention reads the image. With the file of a `font`, the text of a prompt, `header`, is first drawn above its
    image, and the decoder does not read it.
    """

    patch_size: int
    max_patches: int
    normalizes: bool
    font: str = ""
    header: str = ""
