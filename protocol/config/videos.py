"""The configuration of a model that reads videos."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec


class VideoProcessorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The attributes that all video processors have.

    Attributes:
        token_id: The token whose embeddings a video's replace.
        frames_per_patch: The frames that are encoded together.
        fps: The frames per second that are read of a file.
        min_frames: The minimum number of these, unless the file has fewer.
        max_frames: The maximum number of frames.
        num_frames: The number of frames that are read of a file; 0 if it depends on the length.
        sampling: Which frames of a file are read: multiples of their distance, rounded down ("steps" of whole patches,
            or "floors"), from the first to the last ("ends"), those at or after equal steps of time ("seconds"), those
            whose number of a second depends on the length of the file ("dynamic", GLM-4.6V), from the first to the last
            but without the first and the last second of long files ("inner", SmolVLM2), or the middles of parts of
            equal length ("middles", InternVL).
        max_seconds: The length of a file in seconds from which on "seconds" are farther apart.
        mark: The text that stands for a video in prompts; empty for that of `mark_id`.
        mark_id: The token that stands for a video in prompts; None for `token_id`.
        resample: The filter, by Pillow's number.
        scale: The factor on values from 0 to 255.
        mean: The mean of each channel, which is subtracted from these products.
        std: The divisor of each channel after that.
    """

    token_id: int
    frames_per_patch: int = 1
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    num_frames: int = 0
    sampling: Literal["steps", "floors", "ends", "seconds", "dynamic", "inner", "middles"] = "steps"
    max_seconds: float = 300.0
    mark: str = ""
    mark_id: int | None = None
    resample: int = 3
    scale: float = 1 / 255
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)


class VideoProcessor(VideoProcessorConfig, frozen=True, kw_only=True, tag="grids"):
    """Resizes frames to multiples of `unit` pixels; `frames_per_patch` of them become one grid of embeddings.

    Attributes:
        unit: The side of the square of pixels that is an embedding.
        min_pixels: The minimum number of pixels of a frame, or of all frames with `limits_whole`.
        max_pixels: The maximum of the same.
        limits_whole: Whether the limits are for all frames together.
        steps_per_second: How far apart the grids of a second are in rotary positions; 0 for one step a grid.
        times: The time in seconds that is beside each grid as text: the mean of its frames before it ("mean"), or that
            of the first one after it, as a number ("whole", GLM-4.1V) or with a fraction ("first"); None if grids
            follow one another.
        start_token_id: The token before each grid that has a time.
        end_token_id: The token after it.
    """

    unit: int
    min_pixels: int
    max_pixels: int
    limits_whole: bool = False
    steps_per_second: float = 0.0
    times: Literal["mean", "whole", "first"] | None = None
    start_token_id: int | None = None
    end_token_id: int | None = None

    @property
    def max_outputs(self) -> int:
        """The most embeddings that are made at once."""
        return self.max_pixels // self.unit**2


class FrameProcessor(VideoProcessorConfig, frozen=True, kw_only=True, tag="frames"):
    """Resizes each frame to a square of `side` pixels, which is read by itself.

    Attributes:
        side: The side of this square.
        longest_edge: The longer side in pixels to which frames are resized before that; 0 for none.
        num_outputs: The embeddings of a frame.
        is_pooled: Whether they are fewer than those of an image, and the last frame has another one behind it
            (LLaVA-OneVision).
        labels: The text before each frame: its time, after a sentence about the whole video ("times", SmolVLM2), or
            its number ("numbers", InternVL); None if frames follow one another.
        start: The text before each frame, behind its label.
        end: The text after it.
    """

    side: int
    num_outputs: int
    longest_edge: int = 0
    is_pooled: bool = False
    labels: Literal["times", "numbers"] | None = None
    start: str = ""
    end: str = ""

    @property
    def max_outputs(self) -> int:
        """The most embeddings that are made at once."""
        return self.num_outputs + self.is_pooled


AnyVideoProcessor: TypeAlias = VideoProcessor | FrameProcessor
