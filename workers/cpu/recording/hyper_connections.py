"""Record hyper-connections: a token has several streams, which each block mixes."""

from __future__ import annotations

import numpy as np

from ...layers.spec import ModelSpec
from ...layers.specs.hyper import HyperConnectionsSpec
from ..abi import structs
from ..weights import NativeWeightReader
from .blocks import BlockRecorder


class NativeHyperConnection(structs.HyperConnection):
    """The weights of one connection, as a struct whose address is passed to native code.

    It keeps the arrays that it points to alive.
    """

    def __init__(
        self,
        spec: ModelSpec,
        hyper: HyperConnectionsSpec,
        weights: NativeWeightReader,
        name: str,
        num_factors: int,
    ) -> None:
        count = hyper.num_streams
        # After the last layer, streams are not replaced by sums.
        num_iterations = hyper.num_iterations if num_factors > 1 else 0
        num_logits = num_factors * count + bool(num_iterations) * count**2
        weight = weights.read_float32(f"{name}.fn", num_logits, count * spec.hidden_size).numpy()
        self._arrays = (
            np.ascontiguousarray(weight),
            weights.vector(f"{name}.base", num_logits),
            weights.vector(f"{name}.scale", num_factors + bool(num_iterations)),
        )
        super().__init__(
            num_factors,
            num_iterations,
            hyper.eps,
            hyper.output_scale,
            spec.norm_eps,
            *(array.ctypes.data for array in self._arrays),
        )


class HyperRecorder:
    """Records how embeddings become streams, how a block is connected to them, and how they become one hidden state."""

    def __init__(self, blocks: BlockRecorder, hyper: HyperConnectionsSpec) -> None:
        self._blocks = blocks
        self._hyper = hyper
        self._program = blocks.program

    def expand(self) -> None:
        """Record that all streams begin as the embedding, which is in the residual stream."""
        self._program.add_op("repeat_streams")

    def mix(self, name: str, num_factors: int = 2) -> NativeHyperConnection:
        """Record that the residual stream becomes a sum of the streams. Return the connection called `name`."""
        blocks = self._blocks
        connection = NativeHyperConnection(
            blocks.spec, self._hyper, blocks.weights, name, num_factors
        )
        self._program.add_op("mix_streams", hyper=connection)
        return connection

    def update(self, connection: NativeHyperConnection) -> None:
        """Record that what a block has added to its input is added to the streams."""
        self._program.add_op("update_streams", hyper=connection)

    def reduce(self) -> None:
        """Record that the residual stream becomes the input of the final norm."""
        if self._hyper.averages_last:
            self._program.add_op("mix_streams", hyper=structs.HyperConnection())
        else:
            self.mix("head_hc", 1)
