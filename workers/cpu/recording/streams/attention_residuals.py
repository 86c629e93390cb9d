"""Record attention residuals: blocks attend to a token's streams, and add to one of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....layers.specs.attention_residuals import AttentionResidualsSpec
from ....models.layer_kinds.messages import skip_message_queries
from ....models.layer_kinds.stream_attention import read_stream_queries
from ...program import Floats
from ..blocks import BlockRecorder
from .messages import MessageRecorder


class AttentionResidualRecorder:
    """Records what a block reads of the streams, and to which of them its output is added."""

    def __init__(self, blocks: BlockRecorder, residuals: AttentionResidualsSpec) -> None:
        self._blocks = blocks
        self._residuals = residuals
        self._program = blocks.program
        self._own, self._begins = 0, False
        self._queries: Sequence[Floats] = ()
        self._num_read = 0
        self._messages: MessageRecorder | None = None
        skip_message_queries(blocks.weights)

    def expand(self) -> None:
        """Record that all streams begin as the embedding. Sums replace all but the first of them."""
        self._program.add_op("repeat_streams")

    def mix(self, prefix: str, index: int, *, is_mlp: bool) -> None:
        """Record that the residual stream becomes the mean of the streams that a block of layer `index` reads.

        If the block has several inputs, `read` records each of them.
        """
        residuals, input_norms = self._residuals, self._blocks.spec.layers[index].input_norms
        self._own = residuals.stream_of(index)
        self._begins = residuals.begins(index) and not is_mlp
        count = 1 if is_mlp else max(1, len(set(input_norms)))
        name = f"{prefix}{'mlp' if is_mlp else 'attn'}_res"
        self._prepare(name, residuals.num_read(index, is_mlp=is_mlp), count)
        self._messages = None
        if residuals.looped_index(index) is not None:
            self._messages = MessageRecorder(self._blocks, residuals, prefix, index, is_mlp=is_mlp)
        if is_mlp or not input_norms:
            self.read(0)

    def read(self, number: int, first_column: int = 0) -> None:
        """Record that the residual stream becomes the mean with this one of the block's queries.

        It is combined with a message in the projection, from `first_column` on.
        """
        self._attend(self._queries[min(number, len(self._queries) - 1)] if self._queries else None)
        if self._messages is not None:
            self._messages.combine(number, first_column)

    def copy_sums(self) -> None:
        """Record that the sums are copied from which messages are computed."""
        sums = self._residuals.repeated_sums
        self._program.add_op(
            "copy_streams",
            first_column=sums.start * self._size,
            num_columns=len(sums) * self._size,
        )

    def _attend(self, query: Floats | None) -> None:
        has_query = query is not None
        if query is None:
            query = np.zeros(self._size, np.float32)
        self._program.add_op(
            "attend_streams",
            vectors=[query],
            num_columns=self._num_read,
            norms_values=self._residuals.norms_values and has_query,
            eps=self._residuals.eps,
        )

    def update(self) -> None:
        """Record that what a block has added to its input is added to the stream of its group."""
        self._program.add_op(
            "add_to_stream",
            first_column=self._own * self._size,
            scale=0.0 if self._begins else 1.0,
        )

    def reduce(self) -> None:
        """Record that the residual stream becomes the input of the final norm."""
        self._prepare("head_res", 1 + self._residuals.num_sums, 1)
        self.read(0)

    def _prepare(self, name: str, num_read: int, count: int) -> None:
        self._num_read, self._queries = num_read, ()
        if num_read > 1:
            spec, weights = self._blocks.spec, self._blocks.weights
            queries = read_stream_queries(spec, self._residuals, weights, name, count)
            self._queries = [np.ascontiguousarray(each.numpy()) for each in queries]

    @property
    def _size(self) -> int:
        return self._blocks.spec.hidden_size
