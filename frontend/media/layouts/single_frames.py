"""Videos whose frames are encoded one by one (SmolVLM2, LLaVA-OneVision, InternVL, Gemma 4, MiniCPM-V)."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from ....protocol.config.videos import FrameProcessor
from ....protocol.encoder_inputs.payloads import ImagePayload
from .grids import fit_longest
from .pixels import Parts, Sizes, Tile, Video
from .resized import check_ratio
from .sized import budget_grid
from .slices import area_size

_WORDS: Final = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS: Final = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def fit_single_frames(
    width: int, height: int, num_frames: int, config: FrameProcessor, max_outputs: int
) -> Sizes:
    """Return the sizes to which frames of a video are resized, as `fit_frames` does.

    Raises:
        ValueError: The frames have too many embeddings, or their aspect ratio is above the maximum.
    """
    grid = (1, 1)
    of_frame, has_own_grid = config.num_outputs, config.side_factor and not config.side
    if has_own_grid:
        grid = budget_grid(width, height, config.num_outputs, config.side_factor)
        of_frame = grid[0] * grid[1]
    num_outputs = num_frames * of_frame + config.is_pooled
    if num_outputs > max_outputs:
        raise ValueError(
            f"its {num_frames} frames take {num_outputs} tokens, and at most {max_outputs} fit into the context; "
            "send fewer frames"
        )
    if has_own_grid:
        return ((grid[0] * config.side_factor, grid[1] * config.side_factor),)
    if config.side_factor:
        check_ratio(width, height)
        return (area_size(width, height, config.side, config.side_factor),)
    square = config.side, config.side
    if not config.longest_edge:
        return (square,)
    return fit_longest(width, height, config.longest_edge), square


def single_frames(video: Video, config: FrameProcessor) -> Parts:
    """Return the texts and tiles that replace a video in a prompt: each frame after its label."""
    parts: Parts = []
    last = len(video.frames) - 1
    if config.labels == "times":
        duration = timedelta(seconds=int(video.seconds))
        parts.append(
            f"You are provided the following series of {in_words(last + 1)} frames from a {duration} [H:MM:SS] "
            "video.\n"
        )
    for index, (frame, number) in enumerate(zip(video.frames, video.numbers, strict=True)):
        ends = config.is_pooled and index == last
        num_outputs = config.num_outputs
        factor = config.side_factor
        if factor and not config.side:
            num_outputs = frame.width // factor * (frame.height // factor)
        payload = ImagePayload(
            frame.width,
            frame.height,
            frame.tobytes(),
            config.scale,
            config.mean,
            config.std,
            is_frame=config.is_pooled,
            is_last=ends,
        )
        label = _label(index, number / video.fps, config)
        parts += [label + config.start, Tile(payload, num_outputs + ends), config.end]
    return [*parts, "\n\n"] if config.labels == "times" else parts


def _label(index: int, second: float, config: FrameProcessor) -> str:
    clock = f"{int(second // 60):02d}:{int(second % 60):02d}"
    if config.labels == "times":
        return f"\nFrame from {clock}:"
    if config.labels == "clock":
        return " " * (index > 0) + f"{clock} "
    if config.labels == "numbers":
        return "\n" * (index > 0) + f"Frame{index + 1}: "
    return ""


def in_words(number: int) -> str:
    """Return a number from 0 to 9999 in English words, as in the prompts of SmolVLM2."""
    if number < 20:
        return _WORDS[number]
    if number < 100:
        tens, rest = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_WORDS[rest]}" if rest else "")
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    count, rest = divmod(number, unit)
    joint = " and " if rest < 100 else ", "
    return f"{in_words(count)} {name}" + (joint + in_words(rest) if rest else "")
