"""A decoder layer that norms the residual stream after each block (BERT, BART, GPT-1).

Shapes: T tokens of a step, D hidden size.
"""

from __future__ import annotations

from torch import Tensor

from ...layers.layers import RMSNorm
from ..decoder_layer import DecoderLayer
from ..layer_step import LayerStep


class NormedStreamLayer(DecoderLayer):
    """A decoder layer whose norms replace the residual stream instead of being applied to a block's input."""

    def forward(self, x_TD: Tensor, block_TD: Tensor | None, step: LayerStep) -> None:
        """Update the stream `x_TD` in place. Nothing is left to be added, so the result is None."""
        assert block_TD is None and self._mlp is not None
        block_TD = self._mixed(x_TD, step)
        if self._attention_sum_norm is not None:
            block_TD = self._attention_sum_norm(block_TD + x_TD)
        self._add_and_norm(x_TD, block_TD, self._attention_output_norm)
        if self.cross is not None and not (self._reads_images and self.cross.reads_T1 is None):
            block_TD = self.cross.forward(x_TD, *step.caches[-1])
            before_TD = x_TD.clone() if self._reads_images else x_TD
            self._add_and_norm(x_TD, block_TD, self._cross_output_norm)
            if self._reads_images and self.cross.reads_T1 is not None:
                x_TD.copy_(x_TD.where(self.cross.reads_T1, before_TD))
        self._add_and_norm(x_TD, self._mlp.forward(x_TD), self._mlp_output_norm)

    def _add_and_norm(self, x_TD: Tensor, block_TD: Tensor, norm: RMSNorm | None) -> None:
        """Add a block's output to the stream, and replace the stream by its norm."""
        assert norm is not None
        x_TD.copy_(norm.add_and_norm(x_TD, block_TD, self._spec.residual_multiplier))
