"""Record messages between passes through layers that are computed several times; see `PassesSpec`."""

from __future__ import annotations

import numpy as np

from ....layers.specs.attention_residuals import AttentionResidualsSpec
from ....models.layer_kinds.messages import MESSAGES, read_message_queries
from ..blocks import BLOCK, BlockRecorder


class MessageRecorder:
    """Records how the inputs of one layer are combined with messages, except in the first pass."""

    def __init__(
        self,
        blocks: BlockRecorder,
        residuals: AttentionResidualsSpec,
        prefix: str,
        index: int,
        *,
        is_mlp: bool,
    ) -> None:
        looped = residuals.looped_index(index)
        assert looped is not None and residuals.passes is not None
        self._blocks, self._residuals, self._prefix = blocks, residuals, prefix
        self._rank = residuals.passes.rank
        self._names = MESSAGES[-1:] if is_mlp else MESSAGES[:-1]
        self._queries = read_message_queries(blocks.spec, residuals, blocks.weights, looped)
        self._is_first = blocks.spec.layers[index].weights is None

    def combine(self, number: int, first_column: int) -> None:
        """Record that the residual stream is combined with one of the messages to this block.

        The projection from `first_column` on is overwritten.
        """
        blocks, program, name = self._blocks, self._blocks.program, self._names[number]
        size, sums = blocks.spec.hidden_size, self._residuals.repeated_sums
        down, forget, gain = (
            blocks.weights.packed(f"{self._prefix}{name}_message.{part}.weight", rows, columns)
            for part, rows, columns in (
                ("down", self._rank, 2 * size),
                ("forget", size, self._rank),
                ("gain", size, self._rank),
            )
        )
        program.is_deferred = self._is_first
        program.add_op(
            "attend_streams",
            vectors=[np.ascontiguousarray(self._queries[name].numpy())],
            first_column=(self._residuals.num_streams - len(sums)) * size,
            num_columns=len(sums),
            norms_values=self._residuals.norms_values,
            eps=self._residuals.eps,
            target=BLOCK,
        )
        kind = down.activation_kind.for_whole_rows
        ones = np.ones(size, np.float32)
        program.add_op(
            "join_block", activation_kind=kind, vectors=[ones], first_column=first_column
        )
        blocks.add_product(kind, [down], first_column=first_column)
        kind = forget.activation_kind.for_whole_rows
        program.add_op(
            "quantize_columns",
            activation_kind=kind,
            first_column=first_column,
            num_columns=self._rank,
        )
        blocks.add_product(kind, [forget, gain], first_column=first_column)
        program.add_op("gate_block", first_column=first_column)
        program.is_deferred = False
