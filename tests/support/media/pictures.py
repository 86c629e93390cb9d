"""Pictures of random pixels."""

import numpy as np
from PIL import Image


def random_picture(width: int, height: int, seed: int | None = None) -> Image.Image:
    """Return a picture of this size, which depends on `seed`, or on its width if that is None."""
    rng = np.random.default_rng(width if seed is None else seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
