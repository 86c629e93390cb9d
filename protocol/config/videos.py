"""The configuration of a model that reads videos."""

from __future__ import annotations

from typing import Literal

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
        sampling: Which frames of a file are read: multiples of their distance, rounded down ("steps"), from the first
            to the last ("ends"), those at or after equal steps of time ("seconds"), or those whose number of a second
            depends on the length of the file ("dynamic", GLM-4.6V).
        max_seconds: The length of a file in seconds from which on "seconds" are farther apart.
        steps_per_second: How far apart the grids of a second are in rotary positions; 0 for one step a grid.
        times: The time in seconds that is beside each grid as text: the mean of its frames before it ("mean"), or that
            of the first one after it, as a number ("whole", GLM-4.1V) or with a fraction ("first"); None if grids
            follow one another.
        start_token_id: The token before each grid that has a time.
        end_token_id: The token after it.
        mark_id: The token that stands for a video in prompts; None for `token_id`.
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
    sampling: Literal["steps", "ends", "seconds", "dynamic"] = "steps"
    max_seconds: float = 300.0
    steps_per_second: float = 0.0
    times: Literal["mean", "whole", "first"] | None = None
    start_token_id: int | None = None
    end_token_id: int | None = None
    mark_id: int | None = None
    resample: int = 3
    scale: float = 1 / 255
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
