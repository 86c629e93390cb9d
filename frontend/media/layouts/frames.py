"""Resize and encode videos for models that turn groups of frames into grids of embeddings (Qwen-VL, GLM).

Videos of other models are passed to `single_frames`.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt

from ....protocol.config.videos import AnyVideoProcessor, FrameProcessor, VideoProcessor
from ....protocol.encoder_inputs.inputs import EncoderGrid
from ....protocol.encoder_inputs.payloads import ImagePayload
from .pixels import Parts, Sizes, Tile, Video
from .resized import check_ratio, fit_size, grown_rounded, grown_size
from .single_frames import fit_single_frames, single_frames


def fit_frames(
    width: int, height: int, num_frames: int, config: AnyVideoProcessor, max_outputs: int
) -> Sizes:
    """Return the sizes to which frames are resized one after another. The model reads the last size.

    Args:
        width: The width of a frame.
        height: The height of a frame.
        num_frames: The number of frames.
        config: The video processor of the model.
        max_outputs: The maximum number of embeddings.

    Raises:
        ValueError: The aspect ratio of the frames is too extreme, or they have too many embeddings.
    """
    if isinstance(config, FrameProcessor):
        return fit_single_frames(width, height, num_frames, config, max_outputs)
    unit, per_patch = config.unit, config.frames_per_patch
    if config.target_patches:
        size = _size_of_patches(width, height, config)
    elif config.max_frame_pixels:
        size = _size_with_newlines(width, height, num_frames, config)
    elif config.limits_whole:
        width, height = grown_size(width, height, unit)
        counted = max(1, round(num_frames / per_patch)) * per_patch
        size = fit_size(
            width, height, unit, config.min_pixels, config.max_pixels, num_frames, counted
        )
    else:
        if config.has_ends:
            width, height = grown_rounded(width, height, unit)
        most = config.max_pixels // num_frames if config.shares_pixels else config.max_pixels
        size = fit_size(width, height, unit, config.min_pixels, most)
    num_outputs = _grid(size, config).num_tokens * -(-num_frames // per_patch)
    if num_outputs > max_outputs:
        raise ValueError(
            f"its {num_frames} frames of {width} x {height} pixels take {num_outputs} tokens, and at most "
            f"{max_outputs} fit into the context; send fewer or smaller frames"
        )
    return (size,)


def _size_of_patches(width: int, height: int, config: VideoProcessor) -> tuple[int, int]:
    """Return the size in multiples of `unit` with about `target_patches` patches, in the shape of a frame or square.

    Raises:
        ValueError: The aspect ratio of the frames is above the maximum.
    """
    check_ratio(width, height)
    patch, target = config.patch_size, config.target_patches
    merge = config.unit // patch
    if config.is_square:
        side = max(merge, math.isqrt(target) // merge * merge) * patch
        return side, side
    ratio = width / height
    sides = [max(round(math.sqrt(x)), 1) for x in (target * ratio, target / ratio)]
    larger = [side + -side % merge for side in sides]
    if math.prod(larger) > target:
        larger = [max(merge, side - side % merge) for side in sides]
    return larger[0] * patch, larger[1] * patch


def _size_with_newlines(
    width: int, height: int, num_frames: int, config: VideoProcessor
) -> tuple[int, int]:
    """Return the largest size of a frame that keeps its shape, does not enlarge it, and is within both limits.

    Raises:
        ValueError: The aspect ratio of the frames is above the maximum.
    """
    check_ratio(width, height)
    unit = config.unit
    of_all, of_frame = (most // unit**2 for most in (config.max_pixels, config.max_frame_pixels))
    for rows in range(max(1, height // unit), 0, -1):
        # A frame of this shape that is scaled to this many rows, with a remainder, has `least` to `most` columns.
        least = width * rows // height if rows > 1 else 1
        most = -(-width * (rows + 1) // height) - 1
        most = min(max(1, most), max(1, width // unit))
        columns = min(most, of_all // (num_frames * rows) - 1, of_frame // rows)
        if columns >= max(1, least):
            return columns * unit, rows * unit
    return unit, unit


def _grid(size: tuple[int, int], config: VideoProcessor) -> EncoderGrid:
    """Return the rows and columns of embeddings of a frame of this width and height."""
    columns = size[0] // config.unit + bool(config.max_frame_pixels)
    return EncoderGrid(size[1] // config.unit, columns)


def frames(video: Video, config: AnyVideoProcessor, around: tuple[str, str]) -> Parts:
    """Return the texts and tiles that replace a video in a prompt.

    Args:
        video: The video. Its frames have the last size that `fit_frames` returns.
        config: The video processor of the model.
        around: The texts before and after each grid that has a time.
    """
    if isinstance(config, FrameProcessor):
        return single_frames(video, config)
    per_patch = config.frames_per_patch
    size, numbers = video.frames[0].size, video.numbers
    pixels = [frame.tobytes() for frame in video.frames]
    missing = -len(pixels) % per_patch
    pixels += pixels[-1:] * missing
    numbers = [*numbers, *[numbers[-1]] * missing]
    seconds_per_grid = per_patch / video.sampled_fps
    parts: Parts = []
    for index, start in enumerate(range(0, len(pixels), per_patch)):
        payload = ImagePayload(
            *size,
            b"".join(pixels[start : start + per_patch]),
            config.scale,
            config.mean,
            config.std,
            num_frames=per_patch,
        )
        grid = _grid(size, config)
        tile = Tile(payload, grid.num_tokens, grid=grid)
        if config.least_change:
            payload = msgspec.structs.replace(payload, is_frame=True)
            kept = _changed(payload, pixels[start - 1] if start else b"", config)
            payload = msgspec.structs.replace(payload, kept=kept.tobytes())
            tile = Tile(payload, len(kept))
        if config.has_ends:
            marks = (2,) * (start == 0), (3,) * (start + per_patch >= len(pixels))
            payload = msgspec.structs.replace(payload, is_frame=True, marks=marks)
            parts.append(Tile(payload, grid.num_tokens + sum(map(len, marks))))
            continue
        if config.times is not None:
            if config.times == "each":
                before, after = _labels(video, start, config), ""
            elif config.times == "named":
                before, after = f"{',' * (start > 0)}Time {numbers[start] / video.fps:.1f}s:", ""
            else:
                before, after = _times(numbers[start : start + per_patch], video.fps, config)
            parts += [before + around[0], tile, around[1] + after]
        elif config.max_frame_pixels:
            parts.append(tile)
        else:
            step = config.steps_per_second * seconds_per_grid or 1.0
            grid = EncoderGrid(grid.rows, grid.columns, int(index * step), continues=index > 0)
            parts.append(tile._replace(grid=grid))
    return parts


def _changed(frame: ImagePayload, previous: bytes, config: VideoProcessor) -> npt.NDArray[np.int32]:
    """Return the numbers of the squares of a frame that differ from those of the previous one, at least the first.

    `previous` are the pixels of the previous frame; without one, all squares differ.
    """
    unit, columns, rows = config.unit, frame.width // config.unit, frame.height // config.unit
    if not previous:
        return np.arange(columns * rows, dtype=np.int32)
    now, before = (
        np.frombuffer(each, np.uint8).astype(np.float32) for each in (frame.pixels, previous)
    )
    change = np.abs(now - before).reshape(rows, unit, columns, unit, 3)
    change *= np.float32(255 * config.scale) / np.asarray(config.std, np.float32)
    changed = np.flatnonzero(change.mean((1, 3, 4)) > config.least_change).astype(np.int32)
    return changed if len(changed) else np.zeros(1, np.int32)


def _times(numbers: list[int], fps: float, config: VideoProcessor) -> tuple[str, str]:
    """Return the texts with times before and after a grid of frames. `numbers` are the indices of the frames."""
    if config.times == "mean":
        return f"<{(numbers[0] + numbers[-1]) / fps / 2:.1f} seconds>", ""
    first = numbers[0] / fps
    return "", str(int(first)) if config.times == "whole" else f"{first:.1f} seconds"


def _labels(video: Video, start: int, config: VideoProcessor) -> str:
    """Return the numbers and times of the frames of a grid, the first of which has the index `start`."""
    indices = range(start, min(start + config.frames_per_patch, len(video.numbers)))
    # The duration of a frame is rounded down to milliseconds first, as in transformers.
    duration = int(1000 / video.fps)
    frames = [
        f"frame {i + 1} sampled at {video.numbers[i] * duration / 1000:.2f} seconds"
        for i in indices
    ]
    return ("\n" if start else "") + " and ".join(frames).capitalize() + ": "
