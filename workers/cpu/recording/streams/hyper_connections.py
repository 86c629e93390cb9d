"""Record hyper-connections: a token has several streams, which each block mixes."""

from __future__ import annotations

from ....layers.specs.hyper import HyperConnectionsSpec
from ...abi import structs
from ..blocks import BlockRecorder


class HyperRecorder:
    """Records how embeddings become streams, how a block is connected to them, and how they become one hidden state."""

    def __init__(self, blocks: BlockRecorder, hyper: HyperConnectionsSpec) -> None:
        self._blocks = blocks
        self._hyper = hyper
        self._program = blocks.program
        self._connection: structs.HyperConnection | None = None

    def expand(self) -> None:
        """Record that all streams begin as the embedding, which is in the residual stream."""
        self._program.add_op("repeat_streams")

    def mix(self, prefix: str, index: int, *, is_mlp: bool) -> None:
        """Record that the residual stream becomes the sum of the streams that a block reads."""
        self._connection = self._mix(f"{prefix}{'mlp' if is_mlp else 'attn'}_hc")

    def _mix(self, name: str, num_factors: int = 2) -> structs.HyperConnection:
        """Record that the residual stream becomes a sum of the streams. Return the connection called `name`."""
        hyper, spec, weights = self._hyper, self._blocks.spec, self._blocks.weights
        if hyper.rank:
            return self._mix_normed(name, num_factors > 1)
        count = hyper.num_streams
        # After the last layer, streams are not replaced by sums.
        num_iterations = hyper.num_iterations if num_factors > 1 else 0
        num_logits = num_factors * count + bool(num_iterations) * count**2
        connection = structs.HyperConnection(
            num_factors,
            num_iterations,
            hyper.eps,
            hyper.output_scale,
            spec.norm_eps,
            weights.floats(f"{name}.fn", num_logits, count * spec.hidden_size),
            weights.vector(f"{name}.base", num_logits),
            weights.vector(f"{name}.scale", num_factors + bool(num_iterations)),
        )
        self._program.add_op("mix_streams", hyper=connection)
        return connection

    def _mix_normed(self, name: str, has_output: bool) -> structs.HyperConnection:
        """Record that the residual stream becomes a mean of the normed streams, whose factors have low rank.

        Without `has_output`, no block's output is added to the streams.
        """
        blocks, rank, program = self._blocks, self._hyper.rank, self._program
        count, size = self._hyper.num_streams, self._hyper.num_streams * blocks.spec.hidden_size
        down, up = (
            blocks.weights.packed(f"{name}.input_mix_weight_{part}.weight", *shape)
            for part, shape in (("down", (rank, size)), ("up", (size, rank)))
        )
        connection = structs.HyperConnection(
            output_scale=self._hyper.output_scale,
            norm_eps=blocks.spec.norm_eps,
            weight=blocks.weights.floats(f"{name}.block_inject_weight.weight", count, size)
            if has_output
            else None,
            norm=blocks.norm(f"{name}.hc_norm", size),
        )
        kind = down.activation_kind.for_whole_rows
        program.add_op("norm_streams", activation_kind=kind, hyper=connection)
        program.add_op(
            "gated_linear",
            input_kind=kind,
            activation_kind=up.activation_kind,
            parts=[down],
            scale=1 / count,
        )
        blocks.add_product(up.activation_kind, [up], source=1)
        program.add_op("mix_streams", hyper=connection)
        return connection

    def update(self) -> None:
        """Record that what a block has added to its input is added to the streams."""
        self._program.add_op("update_streams", hyper=self._connection)

    def reduce(self) -> None:
        """Record that the residual stream becomes the input of the final norm."""
        if self._hyper.averages_last:
            self._program.add_op("mix_streams", hyper=structs.HyperConnection())
        else:
            self._mix("head_hc", 1)
