"""Images that clients send as embeddings: place the embeddings in the prompt."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ....protocol.config.images.details import SlicesProcessor
from ....protocol.config.images.processors import AnyImageProcessor
from ....protocol.config.images.sized import FitProcessor, ResizeProcessor
from ....protocol.config.images.tiles import GridProcessor, MosaicProcessor
from ....protocol.encoder_inputs.inputs import EncoderGrid
from ....protocol.encoder_inputs.payloads import EmbeddingPayload
from .grids import tiles_and_whole
from .pixels import Parts, Tile

Grid: TypeAlias = tuple[int, int]
"""Rows and columns of an image's embeddings; for models that split images, of its tiles."""


def embedded(values: NDArray[np.float32], grid: Grid | None, config: AnyImageProcessor) -> Parts:
    """Return the texts and tiles that replace an image in a prompt.

    Args:
        values: The embeddings [K, `output_size`].
        grid: The grid of the embeddings, if the client sent it.
        config: The image processor of the model.

    Raises:
        ValueError: The model needs a grid, or the grid does not match the embeddings.
    """
    has_places = isinstance(config, SlicesProcessor) and config.newline_id is not None
    if has_places or config.mark_ids or isinstance(config, MosaicProcessor):
        raise ValueError("this model does not support embeddings of images; send the images")
    if isinstance(config, GridProcessor):
        return _split(values, grid or (0, 0), config)
    if not isinstance(config, FitProcessor | ResizeProcessor):
        if grid is not None:
            raise ValueError(f"this model needs no grid for embeddings, got {list(grid)}; omit it")
        return [config.start, _tile(values), config.end]
    if grid is None:
        raise ValueError("this model needs the grid of its embeddings, [rows, columns]")
    rows, columns = grid
    if rows * columns != len(values):
        raise ValueError(
            f"a grid of {rows} x {columns} has {rows * columns} embeddings, not {len(values)}"
        )
    tile = _tile(values)
    if isinstance(config, ResizeProcessor):
        return [tile._replace(grid=EncoderGrid(rows, columns))]
    if config.row_end:
        tile = tile._replace(row_length=columns, separator=config.row_end)
    return [config.start, tile, config.end]


def _split(values: NDArray[np.float32], grid: Grid, config: GridProcessor) -> Parts:
    rows, columns = grid
    size = config.num_outputs
    expected = (rows * columns + 1) * size
    if len(values) != expected:
        raise ValueError(
            f"a grid of {rows} x {columns} tiles and the whole image have {expected} embeddings, not "
            f"{len(values)}"
        )
    tiles = [_tile(values[start : start + size]) for start in range(0, expected, size)]
    each_row = [tiles[row * columns : (row + 1) * columns] for row in range(rows)]
    return tiles_and_whole(each_row, tiles[-1])


def _tile(values: NDArray[np.float32]) -> Tile:
    rows, columns = values.shape
    return Tile(EmbeddingPayload(rows, columns, values.astype("<f4").tobytes()), rows)
