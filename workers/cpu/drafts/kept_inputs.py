"""The hidden states of a native program's step, with the inputs of layers that a drafting head reads.

Shapes: T tokens of a step, E elements of a token that a pipeline stage receives, computes or sends.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...layers.parallel.shard import ModelShard
from ...layers.spec import ModelSpec
from ...models.stage.kept_inputs import KeptInputs


class NativeKeptInputs(KeptInputs):
    """The kept layers of a stage, and their columns in the hidden states that its program writes.

    In the last stage, the normed hidden states come first, and then the input of each kept layer in the head's order.
    In other stages, the inputs of the stage's own kept layers follow what the layers receive and send.
    """

    def __init__(self, spec: ModelSpec, shard: ModelShard, layers: Sequence[int] | None) -> None:
        super().__init__(spec, shard, layers)
        self._sent_width = spec.hidden_size
        if not shard.is_last:
            self._sent_width = spec.stage_width(shard.layers.stop)
        self._places = [(layer, place * self._size) for place, layer in enumerate(self.layers, 1)]
        self._first_own = max(self._own_received_width, self._sent_width)
        self.columns: list[tuple[int, int]] = []
        """The layers whose inputs the program of this stage writes, each with its first column."""
        if shard.is_last:
            self.columns = [each for each in self._places if each[0] not in self.received]
        else:
            own = sorted({layer for layer in self.layers if layer in shard.layers})
            self.columns = [(x, self._first_own + i * self._size) for i, x in enumerate(own)]
        own_width = self.kept_width or self._first_own + len(self.columns) * self._size
        self._width = max(own_width, self._own_received_width)

    def begin_step(
        self, num_tokens: int, received_TE: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        """Return the array that the program reads and overwrites; `received_TE` is None if it starts from tokens."""
        if received_TE is None:
            width = self._width if self.layers else self._sent_width
            return np.empty((num_tokens, width), np.float32)
        if not self.layers:
            return received_TE
        hidden_TE = np.empty((num_tokens, self._width), np.float32)
        hidden_TE[:, : self._own_received_width] = received_TE[:, : self._own_received_width]
        return hidden_TE

    def finish_step(
        self, hidden_TE: NDArray[np.float32], received_TE: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        """Return what `forward` returns, after the program has run.

        In the last stage, also complete the states that the head reads, the first `kept_width` columns of `hidden_TE`.
        """
        sent_TE = hidden_TE[:, : self._sent_width]
        kept_TE = (
            hidden_TE[:, :0] if received_TE is None else received_TE[:, self._own_received_width :]
        )
        if self.kept_width:
            for layer, column in self._places:
                if layer in self.received:
                    first = self.received.index(layer) * self._size
                    hidden_TE[:, column : column + self._size] = kept_TE[
                        :, first : first + self._size
                    ]
        elif self.layers:
            return np.concatenate((sent_TE, kept_TE, hidden_TE[:, self._first_own :]), 1)
        return np.ascontiguousarray(sent_TE)
