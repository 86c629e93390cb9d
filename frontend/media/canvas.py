"""Rotary positions of images whose marks and slices lie on one canvas (MiniCPM-V 4.7)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import sha256
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...protocol.arrays import int32_bytes
from ...protocol.encoder_inputs.inputs import EncoderGrid, EncoderInput

_ROW, _COLUMN = 1, 2


def with_places(
    token_ids: Sequence[int], inputs: Sequence[EncoderInput], marks: Collection[int]
) -> list[EncoderInput]:
    """Return the inputs of an image, the first of which has the positions of all, and of the marks around them.

    Args:
        token_ids: The prompt. The token before an input and the one after it are marks.
        inputs: The whole image, then its slices row by row, with their grids. All slices have equal grids.
        marks: The tokens that belong to an image if they directly follow its last input.
    """
    whole, *slices = inputs
    start, end = whole.position - 1, inputs[-1].position + inputs[-1].num_tokens
    while end < len(token_ids) and token_ids[end] in marks:
        end += 1
    grid = _grid(slices[0] if slices else whole)
    columns = _columns(slices)
    height, width = grid.rows * max(1, len(slices) // columns), grid.columns * columns
    places_T3 = np.zeros((end - start, 3), np.int64)

    def put(token: int, row: int, column: int) -> None:
        if token < end:
            places_T3[token - start, _ROW:] = row, column

    put(start, -1, -1)
    put(whole.position + whole.num_tokens, height, width)
    own = _grid(whole)
    _put_cells(
        places_T3[whole.position - start :], _spread(height, own.rows), _spread(width, own.columns)
    )
    for number, item in enumerate(slices):
        top, left = number // columns * grid.rows, number % columns * grid.columns
        put(item.position - 1, top, left)
        put(item.position + item.num_tokens, top + grid.rows - 1, left + grid.columns - 1)
        cells = places_T3[item.position - start :]
        _put_cells(cells, np.arange(grid.rows) + top, np.arange(grid.columns) + left)
        if number + 1 < len(slices):
            # A line break follows each row but the last.
            for token in range(
                item.position + item.num_tokens + 1, slices[number + 1].position - 1
            ):
                put(token, top + grid.rows - 1, width)
    places = int32_bytes(places_T3)
    # Equal pixels may have other places, if other slices follow.
    content_hash = sha256(whole.content_hash + places).digest()
    first = msgspec.structs.replace(whole, grid=None, places=places, content_hash=content_hash)
    return [first, *(msgspec.structs.replace(item, grid=None) for item in slices)]


def _grid(item: EncoderInput) -> EncoderGrid:
    assert item.grid is not None, "the layout gives each input a grid"
    return item.grid


def _columns(slices: Sequence[EncoderInput]) -> int:
    """Return the number of slices in a row, which ends with a line break between the marks of two slices."""
    for number, (item, following) in enumerate(pairwise(slices), 1):
        if following.position - item.position - item.num_tokens > 2:
            return number
    return max(1, len(slices))


def _put_cells(
    places_T3: NDArray[np.int64], rows: NDArray[np.int64], columns: NDArray[np.int64]
) -> None:
    """Write the positions of a grid's cells, row by row."""
    cells = places_T3[: len(rows) * len(columns)].reshape(len(rows), len(columns), 3)
    cells[..., _ROW], cells[..., _COLUMN] = rows[:, None], columns


def _spread(length: int, count: int) -> NDArray[np.int64]:
    """Return `count` places from 0 to `length` - 1 at equal distances, rounded as by torch."""
    if count == 1:
        return np.zeros(1, np.int64)
    last = np.float32(length - 1)
    step = last / np.float32(count - 1)
    at = np.arange(count)
    forward = step * at.astype(np.float32)
    backward = last - step * (count - 1 - at).astype(np.float32)
    return np.rint(np.where(at < count // 2, forward, backward)).astype(np.int64)
