"""A decoder layer whose attention and MLP read the same hidden states (GPT-J, Cohere).

Shapes: T tokens of a step, D hidden size.
"""

from __future__ import annotations

from torch import Tensor

from ..decoder_layer import DecoderLayer
from ..layer_step import LayerStep
from ..norms import added


class ParallelLayer(DecoderLayer):
    """A decoder layer that adds the outputs of its attention and its MLP to the stream at once."""

    def forward(self, x_TD: Tensor, block_TD: Tensor | None, step: LayerStep) -> Tensor:
        """Add the previous block's output to the stream `x_TD`. Return the sum of this layer's outputs."""
        x = added(x_TD, block_TD, self._spec, self._attention_input_norm)
        block_TD = self._mixed(x, step)
        if self._mlp is None:
            return block_TD
        if self._mlp_input_norm is not None:
            x = self._mlp_input_norm(x_TD)
        return block_TD.add_(self._mlp.forward(x))
