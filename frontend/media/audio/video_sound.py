"""Put the sound of a video among its frames, as Qwen-Omni reads it (arXiv 2503.20215)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....protocol.arrays import int32_bytes
from ....protocol.config.videos import SoundFormat, VideoProcessor
from ....protocol.encoder_inputs.inputs import EncoderGrid, EncoderInput
from ..media_reader import PreparedImage
from .clips import PreparedAudio


def with_sound(
    video: PreparedImage,
    clip: PreparedAudio,
    config: VideoProcessor,
    fps: float,
    tokens: tuple[str, str, str, str],
) -> PreparedImage:
    """Return a video with its sound.

    Args:
        video: The preprocessed frames, which have grids.
        clip: The sound.
        config: The video processor of the model, which has a format of sound.
        fps: The number of frames per second that positions assume.
        tokens: The texts of the tokens before both, of frames, of sound, and after both.
    """
    sound = config.sound
    assert sound is not None, "the model reads frames and sound separately"
    begin, of_frames, of_sound, end = tokens
    grids = [_grid(item) for item in video.inputs]
    sizes = [grid.num_tokens for grid in grids]
    seconds_per_grid = config.frames_per_patch / fps
    times_V = np.repeat(np.arange(len(grids)) * seconds_per_grid * config.steps_per_second, sizes)
    is_sound = _order(times_V, clip.num_outputs, sound)
    text = begin + "".join(of_sound if each else of_frames for each in is_sound.tolist()) + end
    # The first token of the text is `begin`.
    places = 1 + np.flatnonzero(~is_sound), 1 + np.flatnonzero(is_sound)
    frames = list(_split(video.inputs, places[0]))
    positions = int32_bytes(_positions(grids, times_V, is_sound, sound))
    # Equal frames may be among other sounds.
    content_hash = sha256(frames[0].content_hash + positions).digest()
    frames[0] = msgspec.structs.replace(frames[0], places=positions, content_hash=content_hash)
    sounds = list(_split(clip.inputs, places[1]))
    return video._replace(text=text, inputs=frames, sounds=sounds)


def _order(times_V: NDArray[np.float64], num_sounds: int, sound: SoundFormat) -> NDArray[np.bool_]:
    """Return which tokens of the video are its sound. `times_V` are the times of the frames' tokens."""
    if not sound.chunk_steps:
        # Tokens of frames follow all earlier sounds, and precede those of the same time.
        before = np.minimum(np.ceil(times_V).astype(np.int64), num_sounds)
        is_sound = np.ones(len(times_V) + num_sounds, np.bool_)
        is_sound[np.arange(len(times_V)) + before] = False
        return is_sound
    chunks = [
        _chunk_sizes(times, sound.chunk_steps) for times in (times_V, np.arange(num_sounds) * 1.0)
    ]
    parts: list[NDArray[np.bool_]] = []
    for index in range(max(map(len, chunks))):
        parts += [
            np.full(sizes[index], is_sound)
            for is_sound, sizes in zip((False, True), chunks, strict=True)
            if index < len(sizes)
        ]
    return np.concatenate(parts)


def _chunk_sizes(times: NDArray[Any], steps: int) -> list[int]:
    """Return the numbers of tokens in chunks, as transformers cuts them.

    Each chunk ends at the first token that does not begin before its end. After a gap, chunks therefore have a token.
    """
    sizes: list[int] = []
    start = 0
    while True:
        late = times[start + bool(sizes) :] >= (len(sizes) + 1) * steps
        if not late.any():
            return [*sizes, len(times) - start]
        end = start + bool(sizes) + int(late.argmax())
        sizes.append(end - start)
        start = end


def _positions(
    grids: Sequence[EncoderGrid],
    times_V: NDArray[np.float64],
    is_sound: NDArray[np.bool_],
    sound: SoundFormat,
) -> NDArray[np.int64]:
    """Return rotary positions relative to that which `begin` has as text, int64 [tokens, 3]."""
    cells_V3 = np.concatenate([np.indices((1, g.rows, g.columns)).reshape(3, -1).T for g in grids])
    cells_V3[:, 0] = times_V.astype(np.int64)
    tokens_T3 = np.empty((len(is_sound), 3), np.int64)
    tokens_T3[~is_sound] = cells_V3
    tokens_T3[is_sound] = np.arange(is_sound.sum())[:, None]
    begin = -1 if sound.has_joint_marks else 0
    tokens_T3 += begin + 1
    end = int(tokens_T3.max()) + 1
    marks = [[begin] * 3], [[end] * 3] * (1 + sound.has_joint_marks)
    return np.concatenate((marks[0], tokens_T3, marks[1]))


def _split(inputs: Sequence[EncoderInput], places: NDArray[np.int64]) -> Iterator[EncoderInput]:
    """Yield the inputs at these places of their embeddings, each in as many parts as there are runs of places."""
    ends = list(accumulate(item.size for item in inputs))
    for item, end in zip(inputs, ends, strict=True):
        own = places[end - item.size : end]
        starts = [0, *(np.flatnonzero(np.diff(own) > 1) + 1).tolist(), len(own)]
        for first, last in pairwise(starts):
            yield msgspec.structs.replace(
                item, position=int(own[first]), num_tokens=last - first, first=first, grid=None
            )


def _grid(item: EncoderInput) -> EncoderGrid:
    assert item.grid is not None, "frames of this model have grids"
    return item.grid
