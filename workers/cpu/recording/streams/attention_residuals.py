"""Record attention residuals: blocks attend to a token's streams, and add to one of them."""

from __future__ import annotations

from ....layers.specs.attention_residuals import AttentionResidualsSpec
from ....models.layer_kinds.attention_residuals import read_stream_query
from ..blocks import BlockRecorder


class AttentionResidualRecorder:
    """Records what a block reads of the streams, and to which of them its output is added."""

    def __init__(self, blocks: BlockRecorder, residuals: AttentionResidualsSpec) -> None:
        self._blocks = blocks
        self._residuals = residuals
        self._program = blocks.program
        self._own, self._begins = 0, False

    def expand(self) -> None:
        """Record that all streams begin as the embedding. Sums replace all but the first of them."""
        self._program.add_op("repeat_streams")

    def mix(self, prefix: str, index: int, *, is_mlp: bool) -> None:
        """Record that the residual stream becomes the mean of the streams that a block of layer `index` reads."""
        residuals = self._residuals
        self._own = residuals.stream_of(index)
        self._begins = residuals.begins(index) and not is_mlp
        name = f"{prefix}{'mlp' if is_mlp else 'attn'}_res"
        self._attend(name, residuals.num_read(index, is_mlp=is_mlp))

    def update(self) -> None:
        """Record that what a block has added to its input is added to the stream of its group."""
        self._program.add_op(
            "add_to_stream",
            first_column=self._own * self._blocks.spec.hidden_size,
            scale=0.0 if self._begins else 1.0,
        )

    def reduce(self) -> None:
        """Record that the residual stream becomes the input of the final norm."""
        self._attend("head_res", self._residuals.num_streams)

    def _attend(self, name: str, num_read: int) -> None:
        query = read_stream_query(self._blocks.spec, self._blocks.weights, name).numpy()
        self._program.add_op(
            "attend_streams", vectors=[query], num_columns=num_read, eps=self._residuals.eps
        )
