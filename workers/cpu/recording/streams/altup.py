"""Record alternating updates: a token has several streams, and each layer computes one of them."""

from __future__ import annotations

from collections.abc import Sequence

from ....layers.specs.altup import AltUpSpec
from ....models.weights import Rows
from ...abi import structs
from ...abi.structs import MAX_PARTS
from ...packing import PackedWeight
from ...program import Floats
from ..blocks import BLOCK, BlockRecorder


class AltUpRecorder:
    """Records how embeddings become streams, how a layer updates the streams, and how they become one hidden state."""

    def __init__(self, blocks: BlockRecorder, altup: AltUpSpec) -> None:
        self._blocks = blocks
        self._altup = altup
        self._program = blocks.program

    def expand(self) -> None:
        """Record the expansion of the embedding, which is in the residual stream, to all streams."""
        matrices = self._matrices("altup_projections")
        kind = self._blocks.quantize("", None, matrices)
        for start in range(0, len(matrices), MAX_PARTS):
            parts = matrices[start : start + MAX_PARTS]
            self._blocks.add_product(
                kind, parts, first_column=start * self._blocks.spec.hidden_size
            )
        self._program.add_op("expand_streams")

    def reduce(self) -> None:
        """Record the reduction of the streams to one hidden state."""
        hidden = self._blocks.spec.hidden_size
        for i, matrix in enumerate(self._matrices("altup_unembed_projections")):
            self._program.add_op("load_stream", first_column=(i + 1) * hidden)
            self._blocks.add_product(
                self._blocks.quantize("", None, [matrix]), [matrix], first_column=i * hidden
            )
        self._program.add_op("reduce_streams")

    def predict(self, prefix: str) -> structs.AltUp:
        """Record the prediction of the streams in a layer. Return the weights."""
        weights, count, hidden = (
            self._blocks.weights,
            self._altup.num_streams,
            self._blocks.spec.hidden_size,
        )
        # The tensor exists even in models that do not use it.
        output_scale = weights.vector(f"{prefix}altup.correct_output_scale", hidden)
        altup = structs.AltUp(
            self._altup.active,
            weights.vector(f"{prefix}altup.router_norm.weight", hidden),
            weights.floats(f"{prefix}altup.modality_router.weight", count, hidden),
            weights.floats(f"{prefix}altup.prediction_coefs.weight", count * count, count),
            weights.floats(f"{prefix}altup.correction_coefs.weight", count, count),
            output_scale if self._altup.scales_output else None,
        )
        self._program.add_op("predict_streams", altup=altup)
        return altup

    def correct(self, altup: structs.AltUp) -> None:
        """Record the correction of the streams by the layer's result."""
        self._program.add_op("correct_streams", altup=altup)

    def laurel_projection(self, prefix: str) -> PackedWeight:
        """Return the first matrix of the low-rank product (LAuReL) that is computed in addition to attention."""
        rank, hidden = self._altup.laurel_rank, self._blocks.spec.hidden_size
        rows = Rows(f"{prefix}laurel.linear_left", rank, range(rank))
        return self._blocks.weights.packed_together([rows], hidden)[0]

    def add_laurel(self, prefix: str, input_norm: str, first_column: int) -> None:
        """Record the addition of its norm, and of the low-rank product of that norm, to the residual stream.

        Args:
            prefix: The prefix of the layer's tensors.
            input_norm: The name of the norm of the residual stream.
            first_column: The column of the projection at which the result of the first matrix begins.
        """
        blocks, rank = self._blocks, self._altup.laurel_rank
        right = blocks.weights.packed_columns(
            f"{prefix}laurel.linear_right.weight", blocks.spec.hidden_size, rank, [range(rank)], 0
        )
        self._program.add_op("add_normed", vectors=blocks.hidden_norm(f"{prefix}{input_norm}"))
        columns = range(first_column, first_column + rank)
        blocks.add_second_product(columns, right, 0, target=BLOCK)
        norm: Sequence[Floats | None] = blocks.hidden_norm(f"{prefix}laurel.post_laurel_norm")
        self._program.add_op("norm_add", vectors=norm)

    def _matrices(self, name: str) -> list[PackedWeight]:
        """Return the matrices of all streams but the first, which multiply activations of the same format."""
        weights, hidden = self._blocks.weights, self._blocks.spec.hidden_size
        rows = [
            row
            for i in range(self._altup.num_streams - 1)
            for row in weights.rows(f"{name}.", [str(i)], [hidden], [range(hidden)])
        ]
        return weights.packed_together(rows, hidden)
