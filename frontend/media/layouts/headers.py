"""Draw a text above an image (Pix2Struct)."""

from __future__ import annotations

import textwrap
from typing import Final

from PIL import Image, ImageDraw, ImageFont

_LINE_LENGTH: Final = 80
_FONT_SIZE: Final = 36
_MARGIN: Final = 5
_MAX_SIDE: Final = 16_384
"""Maximum side of an image with its text, in pixels."""


def with_header(image: Image.Image, text: str, font_path: str) -> Image.Image:
    """Return the image below a text in black on white. The narrower of both is enlarged to the width of the other.

    Raises:
        ValueError: The text or the image is too high.
    """
    header = _drawn(text, font_path)
    width = max(header.width, image.width)
    heights = [int(each.height * (width / each.width)) for each in (header, image)]
    if sum(heights) > _MAX_SIDE or not all(heights):
        raise ValueError(
            f"below its text it would have {width} x {sum(heights)} pixels, and the height may be at most {_MAX_SIDE}; "
            "send a shorter text, or an image of another shape"
        )
    found = Image.new("RGB", (width, sum(heights)), "white")
    found.paste(header.resize((width, heights[0])), (0, 0))
    found.paste(image.resize((width, heights[1])), (0, heights[0]))
    return found


def _drawn(text: str, font_path: str) -> Image.Image:
    lines = "\n".join(textwrap.TextWrapper(_LINE_LENGTH).wrap(text))
    font = ImageFont.truetype(font_path, _FONT_SIZE, encoding="UTF-8")
    measure = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    _, _, width, height = measure.textbbox((0, 0), lines, font=font)
    size = int(width) + 2 * _MARGIN, min(int(height) + 2 * _MARGIN, _MAX_SIDE + 1)
    header = Image.new("RGB", size, "white")
    ImageDraw.Draw(header).text((_MARGIN, _MARGIN), lines, fill="black", font=font)
    return header
