"""Spans of a sequence whose tokens also attend to later tokens of the span, such as the tokens of an image.

Shapes: S scheduled slots, T scheduled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...protocol.arrays import Int32Array
from ...protocol.config.images import SpanKind
from ...protocol.messages import EncoderInput


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
            spans = [(item.position, item.position + item.num_tokens) for item in inputs]
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
                if self._kind is SpanKind.PROMPT:
                    visible_T2[tokens, 0] = span_start
        return visible_T2
