"""The content of encoder inputs, as frontends send it to workers."""

from __future__ import annotations

import msgspec

from .inputs import EncoderInput


class ImagePayload(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=True):
    """The data of an image or of frames: pixels as a vision tower reads them, before they are scaled and normalized.

    For each channel, the tower reads (scale * pixels - mean) / std.
    """

    width: int
    """The width in pixels."""
    height: int
    """The height in pixels."""
    pixels: bytes
    """uint8[num_frames, height, width, 3], in RGB."""
    scale: float
    """The factor on pixels."""
    mean: tuple[float, float, float]
    """The number that is subtracted from each channel."""
    std: tuple[float, float, float]
    """The divisor of each channel."""
    grid_columns: int = 0
    """If not 0, the pixels are tiles: the whole image, then a grid of this many columns.

    In the grid, the image was enlarged, with equal margins on both sides. Without a grid, margins are at the right and
    at the bottom.
    """
    original_width: int = 0
    """The width in pixels of the image that was enlarged, or of the image without its margin."""
    original_height: int = 0
    """The height in pixels of the image that was enlarged, or of the image without its margin."""
    num_frames: int = 1
    """The number of frames, or of tiles."""
    is_frame: bool = False
    """True for a frame of a video, for which a tower may compute fewer embeddings."""
    is_last: bool = False
    """True for the last frame or tile, after which a tower may compute one embedding more."""
    marks: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """The numbers of the stored embeddings before the image's own and after them (Ovis)."""
    fine: ImagePayload | None = None
    """A larger copy of the image."""
    token_ids: bytes = b""
    """The tokens of the embeddings, int32 (Molmo 2)."""
    kept: bytes = b""
    """If not empty, int32, ascending: the numbers of the embeddings that are computed (VideoLLaMA 3)."""
    is_float32: bool = False
    """True if the pixels are float32 of the same shape, little-endian, instead of uint8 (Pix2Struct)."""
    instruction: bytes = b""
    """The tokens of the prompt's text, int32, which the encoder reads, too (InstructBLIP)."""


class AudioPayload(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=True):
    """A window of an audio clip."""

    num_mel_bins: int
    """The number of mel bins; 0 if the encoder reads samples."""
    num_frames: int
    """The number of frames of the spectrogram, or of samples."""
    features: bytes
    """float32[num_mel_bins, num_frames] in row-major order, or float32[num_frames] without bins."""
    is_float16: bool = False
    """True if the features are float16."""
    num_outputs: int = 0
    """The number of the encoder's outputs that the model reads, from the first one on; 0 for all."""
    window: int = 0
    """The index of the window in its clip, for encoders that depend on the time."""


class TextPayload(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The data of a source text for an encoder: its `token_ids`, int32.

    The embeddings of `images` replace those of some tokens.
    """

    token_ids: bytes
    images: tuple[EncoderInput, ...] = ()


class EmbeddingPayload(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=True):
    """The data of an image for which the client sent embeddings: `values` are float32[rows, columns], little-endian."""

    rows: int
    columns: int
    values: bytes
