"""The rotary positions of requests with images, for models whose positions have three dimensions.

A token's position in time and in an image's height and width (M-RoPE, arXiv 2409.12191) depends on the encoder inputs
before it. Each worker computes the positions from the inputs with which a request gets its slot, so chunks, preemption
and recovery cannot change them.

Shapes: N slots, T tokens of a step, P tokens up to the end of a request's last encoder input.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...protocol.arrays import Int32Array, int32_view
from ...protocol.encoder_inputs.inputs import EncoderGrid, EncoderInput
from ...protocol.errors import EngineError


class RotaryPositions:
    """The rotary positions of the tokens in every slot.

    `offsets_N` int32 is the difference between rotary position and index for the tokens after all encoder inputs, the
    same in all dimensions. It is 0 for text.

    If `numbers_images`, images do not shift the positions of text, the rows and columns of an image are counted from 0,
    and its position in time is the number of images before it (Hunyuan-OCR, arXiv 2511.19575).
    """

    def __init__(self, num_slots: int, *, numbers_images: bool = False) -> None:
        self._place = _numbered_positions if numbers_images else _positions
        self.offsets_N: Int32Array = np.zeros(num_slots, np.int32)
        self._lengths_N: Int32Array = np.zeros(num_slots, np.int32)
        self._prompts: dict[int, Int32Array] = {}

    def add_request(self, slot: int, inputs: Sequence[EncoderInput]) -> None:
        """Compute the positions of a request that gets a slot.

        Inputs without a grid (audio clips) have positions like text.

        Raises:
            EngineError: Images are numbered and one has no grid, which a correct frontend never sends.
        """
        self.offsets_N[slot] = self._lengths_N[slot] = 0
        if inputs:
            prompt_P3, following = self._place(inputs)
            self._prompts[slot] = prompt_P3
            self._lengths_N[slot] = len(prompt_P3)
            self.offsets_N[slot] = following - len(prompt_P3)
        else:
            self._prompts.pop(slot, None)

    def of_step(
        self, slots_S: Int32Array, query_start_loc: Int32Array, positions_T: Int32Array
    ) -> Int32Array | None:
        """Return the positions, int32 [T, 3], of a step's tokens; None if they are all text.

        Args:
            slots_S: The slots in the order of the step.
            query_start_loc: The index of the first token of each slot, and the end of the last, int32 [S + 1].
            positions_T: The index of each token in its sequence.
        """
        lengths_S = self._lengths_N[slots_S]
        if not lengths_S.any():
            return None
        starts_S, ends_S = query_start_loc[:-1], query_start_loc[1:]
        offsets_T = np.repeat(self.offsets_N[slots_S], ends_S - starts_S)
        rotary_T3 = np.repeat((positions_T + offsets_T)[:, None], 3, axis=1)
        for row in np.flatnonzero(positions_T[starts_S] < lengths_S).tolist():
            start, end = int(starts_S[row]), int(ends_S[row])
            first = int(positions_T[start])
            known_P3 = self._prompts[int(slots_S[row])][first : first + end - start]
            rotary_T3[start : start + len(known_P3)] = known_P3
        return rotary_T3


def _positions(inputs: Sequence[EncoderInput]) -> tuple[Int32Array, int]:
    """Return the positions int32 [P, 3] up to the end of the last input, and the position of the token after it."""
    parts = [_equal(0, 0)]
    token, base, following = 0, 0, 0
    for item in inputs:
        if item.places:
            mark, places = item.position - 1, int32_view(item.places).reshape(-1, 3)
            parts.append(_equal(following, following + mark - token))
            following += mark - token
            parts.append(np.maximum(places.astype(np.int64) + following, 0))
            following, token = int(parts[-1].max()) + 1, mark + len(places)
        if item.position < token or (grid := item.grid) is None:
            # The input is among the places of an earlier one, or its tokens are placed like text.
            continue
        # The embeddings before the grid, and those after it, are placed like text.
        num_text = item.position + grid.margin - token
        parts.append(_equal(following, following + num_text))
        following += num_text
        if not grid.continues:
            base = following
        cells = _cells(grid)
        cells[:, 0] += grid.time + base
        if grid.is_moment:
            following = base + 1
        else:
            cells[:, 1:] += base
            following = max(following, int(cells.max()) + 1)
        parts.append(cells)
        token = item.position + grid.margin + len(cells)
    return np.concatenate(parts).astype(np.int32), following


def _numbered_positions(inputs: Sequence[EncoderInput]) -> tuple[Int32Array, int]:
    """Return the same as `_positions` for models that number images."""
    parts: list[NDArray[np.int64]] = []
    token = 0
    for number, item in enumerate(inputs):
        grid = _grid(item)
        cells = _cells(grid)
        cells[:, 0] = number
        start = item.position + grid.margin
        end = start + len(cells)
        parts += [_equal(token, start), cells, _equal(end, end + grid.margin)]
        token = end + grid.margin
    return np.concatenate(parts).astype(np.int32), token


def _grid(item: EncoderInput) -> EncoderGrid:
    if item.grid is None:
        raise EngineError("an encoder input has no grid, which this model's rotary positions need")
    return item.grid


def _equal(start: int, end: int) -> NDArray[np.int64]:
    """Return positions from `start` to `end` that are equal in all dimensions."""
    return np.repeat(np.arange(start, end)[:, None], 3, axis=1)


def _cells(grid: EncoderGrid) -> NDArray[np.int64]:
    """Return the time (0), row and column of each embedding of a grid."""
    return np.indices((1, grid.rows, grid.columns)).reshape(3, -1).T.copy()
