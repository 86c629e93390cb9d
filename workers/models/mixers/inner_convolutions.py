"""Short convolutions in a layer with attention; see `InnerConvolutions`.

Shapes: T tokens of a step, F channels of this shard's keys and values, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ....protocol.checkpoint.recurrent_layers import InnerConvolutions
from ..layer_source import LayerSource
from .mixer import CausalConvolution, elements
from .states import StateBatch, StateCache


class LayerConvolutions:
    """The convolutions of one layer, each of which adds its input to its result."""

    def __init__(self, layer: InnerConvolutions, source: LayerSource) -> None:
        spec, weights, prefix, shard = source.spec, source.weights, source.prefix, source.shard
        self._size = layer.state_size(shard.tensor_parallel.size)
        heads, size = shard.kv_heads(spec), spec.num_kv_heads * spec.head_dim
        part = elements(heads, spec.head_dim)

        def read(name: str, channels: int, part: range | None = None) -> Tensor:
            shape = channels, 1, layer.kernel
            weight_F1K = weights.read(f"{prefix}{name}.weight", *shape, part=part).float()
            weight_F1K[..., -1] += 1
            return weight_F1K

        keys_and_values = [read(f"self_attn.{name}", size, part) for name in ("k_conv", "v_conv")]
        self._of_keys = CausalConvolution(torch.cat(keys_and_values), None)
        self._of_attention, self._of_mlp = (
            CausalConvolution(read(name, spec.hidden_size), None)
            for name in ("attention_conv", "mlp_conv")
        )
        first = len(shard.heads(spec)) * spec.head_dim
        self._channels = 2 * len(part)
        self._columns = slice(first, first + self._channels)
        self._hidden_size = spec.hidden_size

    def in_step(self, memory: Tensor, batch: StateBatch, dtype: torch.dtype) -> StepConvolutions:
        """Return the convolutions for the tokens of a step, whose inputs have this dtype.

        Args:
            memory: The blocks of the layer's states, uint8 [blocks, bytes].
            batch: The plan of the layer's state group.
            dtype: The dtype of the inputs.
        """
        keys, outputs = StateCache(memory, self._size, dtype).split(self._channels)
        attention, mlp = outputs.split(self._hidden_size)
        of_keys, of_attention, of_mlp = (
            partial(_convolve, convolution, cache, batch)
            for convolution, cache in (
                (self._of_keys, keys),
                (self._of_attention, attention),
                (self._of_mlp, mlp),
            )
        )

        def of_projection(qkv_TF: Tensor) -> Tensor:
            qkv_TF[:, self._columns] = of_keys(qkv_TF[:, self._columns])
            return qkv_TF

        return StepConvolutions(of_projection, of_attention, of_mlp)


class StepConvolutions(NamedTuple):
    """The convolutions of a layer for one step: of keys and values, and of the blocks' outputs [T, D]."""

    of_projection: Callable[[Tensor], Tensor]
    of_attention: partial[Tensor]
    of_mlp: partial[Tensor]


def _convolve(
    convolution: CausalConvolution, cache: StateCache, batch: StateBatch, x_TF: Tensor
) -> Tensor:
    pool_XF = cache.all_inputs(x_TF, batch)
    return convolution(pool_XF[batch.inputs_of_segments]).flatten(0, 1)[batch.tokens].to(x_TF.dtype)
