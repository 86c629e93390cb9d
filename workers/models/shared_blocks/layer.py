"""A recurrent layer that uses a shared transformer block; see `SharedBlock`.

Shapes: T tokens of a step, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...attention import AttentionBackend
from ...layers.layers import LayerKernels
from ...layers.parallel.shard import ModelShard
from ...layers.rope import RotaryTables
from ...layers.shared_block import SharedBlock
from ...layers.spec import LayerSpec, ModelSpec
from ..cross_attention import CrossAttention
from ..decoder_layer import added, read_norm
from ..mixers import make_mixer
from ..weights import WeightReader
from .block import Block

_ADAPTED = ("mlp.gate_up_proj", *(f"self_attn.{name}_proj" for name in "qkv"))


def _skip_other_stages(
    spec: ModelSpec, weights: WeightReader, prefix: str, shard: ModelShard
) -> None:
    """Mark the low-rank products of other stages' layers, which are stored with the block, as not needed."""
    others = [
        layer.shared_block.number
        for i, layer in enumerate(spec.layers)
        if layer.shared_block is not None and i not in shard.layers
    ]
    weights.skip([f"{prefix}{name}_adapters.{number}." for name in _ADAPTED for number in others])


class SharedBlockLayer:
    """A recurrent mixer, whose input is the residual stream plus a projection of a shared block's output.

    `blocks` are the blocks of all layers by their `source`. The first layer that uses a block creates it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layer: LayerSpec,
        use: SharedBlock,
        blocks: dict[int, Block],
        weights: WeightReader,
        prefix: str,
        attention: AttentionBackend,
        shard: ModelShard,
        kernels: LayerKernels,
    ) -> None:
        assert layer.recurrent is not None
        self.rope = layer.rope
        self.cache_groups = layer.cache_groups
        self.cross: CrossAttention | None = None
        self._spec = spec
        of_block = f"layers.{use.source}.shared_block."
        if use.source not in blocks:
            blocks[use.source] = Block(spec, layer, weights, of_block, attention, shard, kernels)
            _skip_other_stages(spec, weights, of_block, shard)
        self._block = blocks[use.source].adapted(
            spec, layer, use, weights, of_block, shard, kernels
        )
        size = spec.hidden_size
        self._linear = kernels.linear(weights.read_matrix(f"{prefix}linear.weight", size, size))
        self._norm = read_norm(spec, weights, f"{prefix}input_layernorm", kernels)
        self._mixer = make_mixer(spec, layer.recurrent, weights, f"{prefix}mixer.", shard, kernels)

    def forward(
        self,
        x_TD: Tensor,
        block_TD: Tensor | None,
        positions_T: Tensor,
        tables: RotaryTables | None,
        caches: Sequence[tuple[Tensor, Any]],
        inputs_TD: Tensor | None,
    ) -> Tensor:
        """Add the previous block's output to the stream `x_TD`. Return the mixer's output, to be added next.

        `inputs_TD` are the embeddings of the tokens.
        """
        assert inputs_TD is not None
        x_TD = added(x_TD, block_TD, self._spec, None)
        both_TE = torch.cat((x_TD, inputs_TD), 1)
        shared_TD = self._linear(self._block.forward(both_TE, positions_T, tables, *caches[0]))
        return self._mixer.forward(self._norm(shared_TD.add_(x_TD)), *caches[-1])
