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
from ...layers.parallel.tensor_parallel import elements
from ..layer_source import LayerSource
from ..weights import WeightReader
from .mixer import CausalConvolution
from .states import StateBatch, StateCache


class LayerConvolutions:
    """The convolutions of one layer, each of which adds its input to its result."""

    def __init__(self, layer: InnerConvolutions, source: LayerSource) -> None:
        spec, weights, prefix, shard = source.spec, source.weights, source.prefix, source.shard
        self._size = layer.state_parts.size(shard.tensor_parallel.size)
        heads, size = shard.kv_heads(spec), spec.num_kv_heads * spec.head_dim
        part = elements(heads, spec.head_dim)

        def read(name: str, channels: int, part: range | None = None) -> Tensor:
            return read_taps(layer, weights, f"{prefix}{name}", channels, part).unsqueeze(1)

        keys_and_values = [read(f"self_attn.{name}", size, part) for name in ("k_conv", "v_conv")]
        self._kernel, self._head_dim = layer.kernel, spec.head_dim
        self._factor = term_factor(layer, is_dynamic=layer.is_dynamic)
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
        of_attention, of_mlp = (
            partial(_convolve, convolution, cache, batch)
            for convolution, cache in ((self._of_attention, attention), (self._of_mlp, mlp))
        )

        def of_projection(qkv_TF: Tensor, taps_TX: Tensor) -> Tensor:
            x_TF = qkv_TF[:, self._columns]
            pool_NXF = keys.all_inputs(x_TF, batch)[batch.inputs_of_segments]
            y_TF = self._of_keys(pool_NXF).flatten(0, 1)[batch.tokens]
            if taps_TX.shape[1]:
                y_TF += self._dynamic(pool_NXF, taps_TX, batch)
            qkv_TF = qkv_TF.clone()
            qkv_TF[:, self._columns] = y_TF.to(qkv_TF.dtype)
            return qkv_TF

        return StepConvolutions(of_projection, of_attention, of_mlp)

    def _dynamic(self, pool_NXF: Tensor, taps_TX: Tensor, batch: StateBatch) -> Tensor:
        """Return the part of the outputs [T, F] that is due to the tokens' own taps, which begin with the last one."""
        windows_NCFK = pool_NXF.float().unfold(1, self._kernel, 1)
        windows_TFK = windows_NCFK.flatten(0, 1)[batch.tokens].flip(-1)
        windows_THVK = windows_TFK.unflatten(1, (-1, self._head_dim))
        taps_TH1K = taps_TX.float().unflatten(1, (-1, 1, self._kernel))
        parts = (windows_THVK * taps_TH1K).unbind(-1)
        return sum(parts[1:], parts[0]).flatten(1) * self._factor


def term_factor(layer: InnerConvolutions, *, is_dynamic: bool) -> float:
    """Return the factor of the terms of a convolution's sum."""
    num_terms = 1 + layer.kernel * (2 if is_dynamic else 1)
    return num_terms**-0.5 if layer.is_scaled else 1.0


def read_taps(
    layer: InnerConvolutions,
    weights: WeightReader,
    name: str,
    channels: int,
    part: range | None = None,
) -> Tensor:
    """Return the taps of a convolution, or of a part of its channels, float32 [F, K], from the earliest token on.

    They include the token itself, which is added to the result, and the factor of the terms.
    """
    is_dynamic = layer.is_dynamic and name.rpartition(".")[2] in ("k_conv", "v_conv")
    if is_dynamic:
        stored_KF = weights.read(f"{name}.static_w", layer.kernel, channels, part=part, dim=1)
        taps_FK = stored_KF.float().flip(0).T.contiguous()
    else:
        taps_FK = weights.read(f"{name}.weight", channels, 1, layer.kernel, part=part).float()[:, 0]
    taps_FK[:, -1] += 1
    return taps_FK * term_factor(layer, is_dynamic=is_dynamic)


class StepConvolutions(NamedTuple):
    """The convolutions of a layer for one step: of keys and values, and of the blocks' outputs [T, D]."""

    of_projection: Callable[[Tensor, Tensor], Tensor]
    of_attention: partial[Tensor]
    of_mlp: partial[Tensor]


def _convolve(
    convolution: CausalConvolution, cache: StateCache, batch: StateBatch, x_TF: Tensor
) -> Tensor:
    pool_XF = cache.all_inputs(x_TF, batch)
    return convolution(pool_XF[batch.inputs_of_segments]).flatten(0, 1)[batch.tokens].to(x_TF.dtype)
