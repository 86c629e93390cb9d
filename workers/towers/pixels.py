"""The pixels of an image as a vision tower reads them.

Shapes: F frames, H rows and W columns of pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...protocol.encoder_inputs.payloads import ImagePayload


def normalized_pixels(
    image: ImagePayload, device: torch.device, dtype: torch.dtype, *, in_bfloat16: bool = False
) -> Tensor:
    """Return the scaled and normalized pixels [F, 3, H, W] of an image or of the frames of a video."""
    # Copy the pixels, because torch requires a writable array, and the bytes of the message are read-only.
    kind = torch.float32 if image.is_float32 else torch.uint8
    pixels = torch.frombuffer(bytearray(image.pixels), dtype=kind).to(device)
    frames_FHWC = pixels.view(image.num_frames, image.height, image.width, 3)
    if in_bfloat16:
        scaled = frames_FHWC.bfloat16() * image.scale
    else:
        # Round as numpy does in transformers' processors.
        scaled = (frames_FHWC.double() * image.scale).float()
    mean, std = scaled.new_tensor(image.mean), scaled.new_tensor(image.std)
    return ((scaled - mean) / std).to(dtype).permute(0, 3, 1, 2)


def split_patches(pixels: Tensor, num_rows: int, num_columns: int, size: int) -> Tensor:
    """Return the pixels of each patch of an image [3, H, W] row by row, [patches, 3 * size ** 2]."""
    whole = pixels[:, : num_rows * size, : num_columns * size]
    patches = whole.reshape(3, num_rows, size, num_columns, size)
    return patches.permute(1, 3, 0, 2, 4).reshape(-1, 3 * size**2)
