"""The configuration of a model that reads videos."""

from __future__ import annotations

import msgspec


class VideoProcessor(msgspec.Struct, frozen=True, kw_only=True):
    """Resizes frames to multiples of `unit` pixels; `frames_per_patch` of them become one grid of embeddings.

    Attributes:
        token_id: The token whose embeddings a video's replace.
        unit: The side of the square of pixels that is an embedding.
        frames_per_patch: The frames of a grid.
        min_pixels: The minimum number of pixels of a frame, or of all frames with `limits_whole`.
        max_pixels: The maximum of the same.
        limits_whole: Whether the limits are for all frames together.
        fps: The frames per second that are read of a file.
        min_frames: The minimum number of these, unless the file has fewer.
        max_frames: The maximum number of frames.
        rounds_indices: Whether the first and the last frame of a file are read. Otherwise the numbers of frames are
            multiples of their distance, and rounded down.
        steps_per_second: How far apart the grids of a second are in rotary positions; 0 for one step a grid.
        start_token_id: The token before each grid, after a text with its time; None if grids follow one another.
        end_token_id: The token after each grid.
        resample: The filter, by Pillow's number.
        scale: The factor on values from 0 to 255.
        mean: The mean of each channel, which is subtracted from these products.
        std: The divisor of each channel after that.
    """

    token_id: int
    unit: int
    frames_per_patch: int
    min_pixels: int
    max_pixels: int
    limits_whole: bool = False
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    rounds_indices: bool = False
    steps_per_second: float = 0.0
    start_token_id: int | None = None
    end_token_id: int | None = None
    resample: int = 3
    scale: float = 1 / 255
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
