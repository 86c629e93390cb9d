"""Decode images of requests, which are untrusted."""

from __future__ import annotations

import io
import warnings
from importlib.util import find_spec
from typing import Final

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ...protocol.config.images.settings import Background
from ...protocol.errors import ParameterError

MAX_PIXELS: Final = 1 << 26
"""Maximum pixels of an image. A decoded image takes three or four bytes per pixel."""

_FORMATS: Final = (
    *("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"),
    # Pillow before 11.3 cannot read it.
    *(("AVIF",) if find_spec("PIL._avif") is not None else ()),
)


def decode_image(data: bytes, where: str, background: Background = "white") -> Image.Image:
    """Return an image in RGB, rotated according to its EXIF data. For an animation, return the first frame.

    Args:
        data: The content of an image file.
        where: The name of the field in errors.
        background: The color behind transparent pixels.

    Raises:
        ParameterError: The file is not an image, is damaged, or has more than `MAX_PIXELS` pixels.
    """
    try:
        with warnings.catch_warnings():
            # Pillow's own limit is off; the limit is checked below.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
        num_pixels = image.width * image.height
        if num_pixels > MAX_PIXELS:
            raise _too_large(where, f"{image.width} x {image.height} pixels")
        image.load()
        return to_rgb(image, background)
    except (ParameterError, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise _too_large(where, f"more than {2 * (Image.MAX_IMAGE_PIXELS or 0)} pixels") from None
    # For damaged files, the decoders raise many kinds of errors.
    except Exception as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            reason = f"it is none of {', '.join(_FORMATS)}"
        raise ParameterError(
            where, f"is not an image that can be read: {reason}; send a valid file"
        ) from None


def to_rgb(image: Image.Image, background: Background = "white") -> Image.Image:
    """Return the image in RGB, rotated according to its EXIF data, on a background.

    The upper 8 bits of 16-bit gray values are kept, as Pillow does for colors. Pillow's own conversion would clip the
    values to 255, so that almost all would become white.
    """
    turned = ImageOps.exif_transpose(image)
    if turned.mode.startswith("I;16"):
        turned = Image.fromarray((np.asarray(turned) >> 8).astype(np.uint8))
    if turned.has_transparency_data:
        turned = turned.convert("RGBA")
        if background == "checkers":
            return _on_checkers(turned)
        turned = Image.alpha_composite(Image.new("RGBA", turned.size, "white"), turned)
    return turned.convert("RGB")


def _on_checkers(image: Image.Image) -> Image.Image:
    """Return an image in RGBA on squares of two grays, rounded as by transformers' processor of Inkling 2."""
    pixels = np.asarray(image).astype(np.int32)
    rows, columns = (np.arange(length) // 8 for length in pixels.shape[:2])
    behind = np.where((rows[:, None] + columns) % 2 == 0, 204, 153)[..., None]
    alpha = pixels[..., 3:]
    mixed = (pixels[..., :3] * alpha + behind * (255 - alpha) + 127) // 255
    return Image.fromarray(mixed.astype(np.uint8))


def _too_large(where: str, size: str) -> ParameterError:
    return ParameterError(
        where,
        f"is too large: it has {size}, and at most {MAX_PIXELS} are allowed; send a smaller one",
    )
