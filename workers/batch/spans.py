"""The tokens to which each token of a sequence attends, if these are not just the earlier ones.

The tokens of a span, such as those of an image, also attend to later tokens of the span.

Shapes: S scheduled slots, T scheduled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from ...protocol.arrays import Int32Array
from ...protocol.config.images.settings import SpanKind
from ...protocol.encoder_inputs.inputs import EncoderInput
from ...protocol.encoder_inputs.payloads import AudioPayload
from ..layers.window import SpanLayers

LIMITS: Final = 2**31 - 1
"""A first position that tells attention kernels that only the end of the range limits the tokens in the window."""

_AUDIO: Final = msgspec.msgpack.encode(AudioPayload(0, 0, b""))[: len("[]AudioPayload")]
"""The beginning of the data of audio clips, whose tokens attend only to earlier ones."""


def visible_in_blocks(positions_T: Int32Array, block_size: int) -> Int32Array:
    """Return the range of positions that each token attends to, as `Spans` does, if each block is a span."""
    ends_T = positions_T - positions_T % block_size + block_size
    return np.stack((positions_T, ends_T), 1).astype(np.int32)


def visible_in_canvases(
    positions_T: Int32Array, num_known_T: Int32Array, size: int, window: int
) -> Int32Array:
    """Return the range of positions that each token attends to, as `Spans` does, if `size` tokens are a canvas.

    A canvas begins after the last of a request's known tokens, which attend to earlier ones. The tokens of a canvas
    attend to all of it, and to those before it that the first one has in its window.
    """
    is_canvas_T = positions_T >= num_known_T
    firsts_T = np.where(is_canvas_T, np.maximum(num_known_T + 1 - window, 0), positions_T)
    ends_T = np.where(is_canvas_T, num_known_T + size, positions_T + 1)
    return np.stack((firsts_T, ends_T), 1).astype(np.int32)


def span_layers(kind: SpanKind | None) -> SpanLayers:
    """Return the layers in which the tokens of spans of this kind attend to later tokens of their span."""
    return SpanLayers.WITH_WINDOW if kind is SpanKind.IMAGE_IN_WINDOWS else SpanLayers.ALL


class VisibleStarts:
    """The requests in a worker's slots whose tokens attend only to the first ones, in a model that is not causal."""

    def __init__(self) -> None:
        self._num_visible: dict[int, int] = {}

    def add_request(self, slot: int, num_visible: int) -> None:
        """Set the number of tokens to which those of a slot attend; 0 for all."""
        self._num_visible.pop(slot, None)
        if num_visible:
            self._num_visible[slot] = num_visible

    def visible_tokens(
        self, slots_S: Int32Array, query_start_loc: Int32Array, seq_lens_S: Int32Array
    ) -> Int32Array | None:
        """Return, for each token, `LIMITS` and the position after the last that it attends to, int32 [T, 2].

        The result is None if tokens attend to their whole sequences.
        """
        if not self._num_visible.keys() & set(slots_S.tolist()):
            return None
        ends_S = [
            self._num_visible.get(slot, length)
            for slot, length in zip(slots_S.tolist(), seq_lens_S.tolist(), strict=True)
        ]
        visible_S2 = np.array([(LIMITS, end) for end in ends_S], np.int32)
        return visible_S2.repeat(np.diff(query_start_loc), 0)


class Spans:
    """The spans of the requests in a worker's slots. A step computes all remaining tokens of a span, or none."""

    def __init__(self, kind: SpanKind) -> None:
        self._kind = kind
        self._by_slot: dict[int, list[tuple[int, int]]] = {}

    def add_request(
        self, slot: int, num_prompt_tokens: int, inputs: Sequence[EncoderInput]
    ) -> None:
        """Set the spans of a slot for a new request with these encoder inputs."""
        if self._kind is SpanKind.PROMPT:
            spans = [(0, num_prompt_tokens)]
        else:
            spans = [
                (item.position, item.position + item.num_tokens)
                for item in inputs
                if not item.data.startswith(_AUDIO)
            ]
        self._by_slot[slot] = spans

    def visible_tokens(
        self, slots_S: Int32Array, query_start_loc: Int32Array, positions_T: Int32Array
    ) -> Int32Array | None:
        """Return the range of positions that each token attends to, int32 [T, 2]; None if attention is causal for all.

        The first number is the position from which a token attends even outside of a window. The second is the position
        after the last one that it attends to.
        """
        visible_T2: Int32Array | None = None
        for row in np.flatnonzero(np.diff(query_start_loc) > 1).tolist():
            start, stop = query_start_loc[row : row + 2].tolist()
            first, end = int(positions_T[start]), int(positions_T[stop - 1]) + 1
            for span_start, span_end in self._by_slot.get(int(slots_S[row]), ()):
                span_end = min(span_end, end)
                if first >= span_end or span_start >= end:
                    continue
                if visible_T2 is None:
                    visible_T2 = np.stack((positions_T, positions_T + 1), 1).astype(np.int32)
                tokens = slice(start + max(span_start - first, 0), start + span_end - first)
                visible_T2[tokens, 1] = span_end
                if self._kind in (SpanKind.PROMPT, SpanKind.WHOLE_IMAGE):
                    visible_T2[tokens, 0] = span_start
        return visible_T2
