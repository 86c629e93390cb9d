"""A recurrent layer that uses a shared transformer block; see `SharedBlock`.

Shapes: T tokens of a step, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....protocol.checkpoint.recurrent_layers import ConvolvedAttention
from ...layers.layer_spec import LayerSpec
from ..cross_attention import CrossAttention
from ..layer_source import LayerSource
from ..layer_step import LayerStep
from ..mixers import make_mixer
from ..norms import added, read_norm
from .block import Block


class SharedBlockLayer:
    """A recurrent mixer, whose input is the residual stream plus a projection of a shared block's output.

    `block` has only the shared weights.
    """

    def __init__(self, layer: LayerSpec, block: Block, source: LayerSource) -> None:
        spec, weights, prefix, shard, kernels = source
        assert layer.recurrent is not None and layer.shared_block is not None
        assert not isinstance(layer.recurrent, ConvolvedAttention)
        self.rope = layer.rope
        self.cache_groups = layer.cache_groups
        self.cross: CrossAttention | None = None
        self._spec = spec
        self._block = block.adapted(spec, layer, weights, shard, kernels)
        size = spec.hidden_size
        self._linear = source.read_linear("linear", size, size)
        self._norm = read_norm(spec, weights, f"{prefix}input_layernorm", kernels)
        self._mixer = make_mixer(layer.recurrent, source.at("mixer."))

    def forward(self, x_TD: Tensor, block_TD: Tensor | None, step: LayerStep) -> Tensor:
        """Add the previous block's output to the stream `x_TD`. Return the mixer's output, to be added next.

        The layer's own input are the embeddings of the tokens.
        """
        assert step.own_TP is not None
        x_TD = added(x_TD, block_TD, self._spec, None)
        both_TE = torch.cat((x_TD, step.own_TP), 1)
        shared_TD = self._linear(
            self._block.forward(both_TE, step.positions_T, step.tables, *step.caches[0])
        )
        return self._mixer.forward(self._norm(shared_TD.add_(x_TD)), *step.caches[-1])
