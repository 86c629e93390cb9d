"""The inputs of layers that a drafting head reads, some of which earlier pipeline stages compute.

A stage sends the inputs of all kept layers up to its last one, in the order of the layers, after the
`ModelSpec.stage_width` elements that the next stage's layers need.

Shapes: T tokens of a step, E elements of a token that a pipeline stage receives or sends, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...layers.parallel.shard import ModelShard
from ...layers.spec import ModelSpec


class KeptInputs:
    """The kept layers of a model, as one pipeline stage sees them.

    Args:
        spec: The model.
        shard: The part of the model that the stage computes.
        layers: The layers whose inputs the head reads, in its order; the number of layers means the final norm's input.
            With hyper-connections, these are means of the streams, or all streams if the connections have a low rank.
            None if there is no head. A head may read only the normed hidden states.
    """

    def __init__(self, spec: ModelSpec, shard: ModelShard, layers: Sequence[int] | None) -> None:
        self.layers = layers or ()
        self._size = spec.hidden_size
        self._own_received_width = spec.stage_width(shard.layers.start)
        self.received = sorted({layer for layer in self.layers if layer < shard.layers.start})
        """The kept layers of earlier stages."""
        self.received_width = self._own_received_width + len(self.received) * spec.hidden_size
        """The number of elements of a token that this stage receives, unless it is the first one."""
        self.kept_width = 0
        """The number of elements of a token that the last stage keeps for the head; 0 in other stages."""
        if layers is not None and shard.is_last:
            self.kept_width = (1 + len(layers)) * spec.hidden_size
            if (hyper := spec.hyper_connections) is not None and hyper.rank and layers:
                self.kept_width = (1 + spec.num_streams) * spec.hidden_size

    def split(self, received: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """Split a stage's inputs into those of its layers and the kept inputs [T, D] by layer."""
        if not self.received:
            return received, {}
        own_TE, kept_TE = received.split(
            (self._own_received_width, len(self.received) * self._size), 1
        )
        return own_TE, dict(zip(self.received, kept_TE.split(self._size, 1), strict=True))

    def joined(self, sent_TE: Tensor, kept: Mapping[int, Tensor]) -> Tensor:
        """Return what a stage sends to the next one, followed by the kept inputs."""
        if not kept:
            return sent_TE
        return torch.cat((sent_TE, *(kept[layer].to(sent_TE.dtype) for layer in sorted(kept))), 1)
