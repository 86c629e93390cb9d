"""Video preprocessing settings of a model: which frames are read, and how they become embeddings."""

from typing import Literal, TypeAlias

import msgspec


class VideoProcessorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that all video processors share.

    Attributes:
        token_id: The placeholder token. The embeddings of a video replace the embeddings of this token.
        frames_per_patch: The number of successive frames that are encoded together.
        fps: The number of frames that are read per second of a file.
        min_frames: The minimum number of frames that are read, unless the file has fewer.
        max_frames: The maximum number of frames that are read.
        num_frames: The fixed number of frames that are read; 0 if it depends on the file's length.
        sampling: The choice of frames. "steps" and "floors": multiples of a fixed distance, rounded down ("steps": a
            whole number of patches). "ends": evenly from the first to the last frame. "seconds": the first frame at or
            after each of equal steps of time. "dynamic" (GLM-4.6V): a rate that depends on the length of the file.
            "inner" (SmolVLM2): as "ends", but without the first and the last second of long files. "middles"
            (InternVL): the middle frame of each of several equal parts.
        max_seconds: The length of a file in seconds above which the steps of "seconds" become longer.
        reads_sound: True if the sound of videos is read, unless a request says otherwise.
        mark: The text that represents a video in prompts; if empty, the text of `mark_id`.
        mark_id: The token that represents a video in prompts; None for `token_id`.
        resample: The resampling filter, as a value of Pillow's `Resampling`.
        scale: The factor that pixel values (0 to 255) are multiplied by.
        mean: The mean of each channel, which is subtracted from the scaled values.
        std: The standard deviation of each channel, by which the differences are divided.
    """

    token_id: int
    frames_per_patch: int = 1
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    num_frames: int = 0
    sampling: Literal["steps", "floors", "ends", "seconds", "dynamic", "inner", "middles"] = "steps"
    max_seconds: float = 300.0
    reads_sound: bool = False
    mark: str = ""
    mark_id: int | None = None
    resample: int = 3
    scale: float = 1 / 255
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)


class SoundFormat(msgspec.Struct, frozen=True):
    """The order of a video's frames and its sound in a prompt (Qwen-Omni), each of whose audio tokens is a position.

    Attributes:
        begin_token_id: The token before them.
        end_token_id: The token after them.
        chunk_steps: The number of temporal positions whose frames precede their sound; 0 if each grid of frames
            precedes the sound from its time on.
        has_joint_marks: True if the marks of the video, around these tokens, have the same positions (Qwen2.5-Omni).
    """

    begin_token_id: int
    end_token_id: int
    chunk_steps: int = 0
    has_joint_marks: bool = False


class VideoProcessor(VideoProcessorConfig, frozen=True, kw_only=True, tag="grids"):
    """Resizes frames to multiples of `unit` pixels; `frames_per_patch` of them become one grid of embeddings.

    Attributes:
        unit: The side in pixels of the square that makes one embedding.
        min_pixels: The minimum number of pixels of a frame, or of all frames with `limits_whole`.
        max_pixels: The maximum number of pixels, counted as for `min_pixels`.
        max_frame_pixels: If not 0, there is one more embedding after each row of a frame (Hy4-VL), and each frame has
            positions of its own, like an image. Frames are not enlarged. They have at most this many pixels each, and
            together at most `max_pixels`, of which the additional embeddings take their part.
        limits_whole: True if `min_pixels` and `max_pixels` apply to all frames together.
        shares_pixels: True if `max_pixels` applies to all frames together, and `min_pixels` to each (VideoLLaMA 3).
        least_change: If not 0, a square of a frame makes an embedding only if its normalized pixels differ from those
            of the previous frame, times 255, by more than this, or if it is the first of a frame without others.
        has_ends: True if a stored embedding precedes the first frame, and another one follows the last (Ovis 2.5).
        target_patches: If not 0, frames are resized to about this many patches of `patch_size` pixels (Nemotron Omni).
        patch_size: The side of such a patch in pixels.
        is_square: True if frames are resized to squares then.
        steps_per_second: The number of temporal rotary positions per second of video; 0 for one position per grid.
        nominal_fps: If not 0, the rate of frames that these positions assume unless the request has one (Qwen-Omni).
            Otherwise they follow the rate of the frames that are read.
        times: The text with each grid's time in seconds. "mean": before the grid, the mean time of its frames. "whole"
            (GLM-4.1V) and "first": after the grid, the time of its first frame as an integer or with a fraction. "each"
            (Nemotron Omni): before the grid, the number and the time of each of its frames, and on a line of its own.
            "named" (VideoLLaMA 3): before the grid, the time of its first frame, after a comma. None: no text.
        sound: The format of videos with sound; None if the sound follows a video like another clip.
        start_token_id: The token before each grid, if `times` is not None.
        end_token_id: The token after each grid, if `times` is not None.
        start: The text before each grid if these tokens are not given.
        end: The text after each grid if these tokens are not given.
    """

    unit: int
    min_pixels: int
    max_pixels: int
    max_frame_pixels: int = 0
    limits_whole: bool = False
    shares_pixels: bool = False
    least_change: float = 0.0
    has_ends: bool = False
    target_patches: int = 0
    patch_size: int = 0
    is_square: bool = False
    steps_per_second: float = 0.0
    nominal_fps: float = 0.0
    times: Literal["mean", "whole", "first", "each", "named"] | None = None
    sound: SoundFormat | None = None
    start_token_id: int | None = None
    end_token_id: int | None = None
    start: str = ""
    end: str = ""

    @property
    def max_outputs(self) -> int:
        """The maximum number of embeddings that are computed at once."""
        if not self.max_frame_pixels:
            return self.max_pixels // self.unit**2 + 2 * self.has_ends
        # At most half of a frame's embeddings follow rows.
        return 2 * max(1, self.max_frame_pixels // self.unit**2)


class FrameProcessor(VideoProcessorConfig, frozen=True, kw_only=True, tag="frames"):
    """Resizes each frame to `side` x `side` pixels and encodes it separately.

    Attributes:
        side: The width and height of a resized frame in pixels.
        side_factor: If not 0, frames keep their shape, and their sides are multiples of this many pixels. If `side` is
            0 (Gemma 4), each square of `side_factor` x `side_factor` pixels makes one embedding, and `num_outputs` is
            the maximum. Otherwise (MiniCPM-V) frames have about `side` x `side` pixels.
        longest_edge: The length in pixels to which a frame's longer side is resized first; 0 to skip this.
        num_outputs: The number of embeddings per frame.
        is_pooled: True if a frame's embeddings are pooled to fewer than an image has, with one more embedding after the
            last frame (LLaVA-OneVision).
        labels: The text before each frame. "times" (SmolVLM2): its time, and a sentence about the video before the
            first frame. "numbers" (InternVL): its number. "clock" (Gemma 4): its time in minutes and seconds. None: no
            text.
        start: The text between a frame's label and the frame.
        end: The text after each frame.
    """

    num_outputs: int
    side: int = 0
    side_factor: int = 0
    longest_edge: int = 0
    is_pooled: bool = False
    labels: Literal["times", "numbers", "clock"] | None = None
    start: str = ""
    end: str = ""

    @property
    def max_outputs(self) -> int:
        """The maximum number of embeddings that are computed at once."""
        return self.num_outputs + self.is_pooled


AnyVideoProcessor: TypeAlias = VideoProcessor | FrameProcessor
