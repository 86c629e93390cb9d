"""Short convolutions of the queries, keys and values of attention; see `HeadConvolutions`.

Shapes: T tokens of a step, N segments of C tokens, L tokens that are combined, H query heads and G key/value heads of
this shard, J of both, K head dimension, F elements of queries, keys and values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....protocol.checkpoint.recurrent_layers import HeadConvolutions
from ...layers.parallel.shard import ModelShard
from ...layers.parallel.tensor_parallel import elements
from ...layers.spec import ModelSpec
from ..layer_source import LayerSource
from ..weights import WeightReader
from .states import StateBatch, StateCache


class HeadMixing:
    """The convolutions of one layer, and the sum of the queries and keys that share a head."""

    def __init__(self, layer: HeadConvolutions, source: LayerSource) -> None:
        spec, shard = source.spec, source.shard
        self._size = layer.state_parts.size(shard.tensor_parallel.size)
        self._taps_JLKK, self._biases_JK = read_head_taps(
            layer, spec, source.weights, source.prefix, shard
        )
        self._head_dim = spec.head_dim
        self._num_heads, self._num_kv_heads = len(shard.heads(spec)), len(shard.kv_heads(spec))
        all_values = elements(shard.kv_heads(spec), spec.head_dim)
        is_delayed = torch.tensor(all_values) >= spec.num_kv_heads * spec.head_dim // 2
        self._is_delayed_F = is_delayed.to(source.weights.device)

    def mix(self, memory: Tensor, batch: StateBatch, qkv_TF: Tensor, _taps: Tensor) -> Tensor:
        """Return the queries, keys and values [T, F].

        Args:
            memory: The blocks of the layer's states, uint8 [blocks, bytes].
            batch: The plan of the layer's state group.
            qkv_TF: The projected queries, keys and values.
        """
        cache = StateCache(memory, self._size, qkv_TF.dtype)
        inputs_NXF = cache.all_inputs(qkv_TF, batch)[batch.inputs_of_segments]
        num_lags, size = self._taps_JLKK.shape[1], self._head_dim
        length = inputs_NXF.shape[1] - (num_lags - 1)
        num_values = self._num_kv_heads * size
        heads_NXJK = inputs_NXF[..., :-num_values].unflatten(-1, (-1, size)).float()
        mixed_NCJK = self._biases_JK.expand(len(heads_NXJK), length, -1, -1).clone()
        for lag, taps_JKK in enumerate(self._taps_JLKK.unbind(1)):
            first = num_lags - 1 - lag
            own_NCJK = heads_NXJK[:, first : first + length]
            mixed_NCJK += torch.einsum("ncji,jio->ncjo", own_NCJK, taps_JKK)
        delayed_NCF = inputs_NXF[:, num_lags - 2 : num_lags - 2 + length, -num_values:]
        mixed_TF, delayed_TF = (
            each.flatten(0, 1)[batch.tokens] for each in (mixed_NCJK.flatten(2), delayed_NCF)
        )
        mixed_TF += _shared(qkv_TF[:, :-num_values].float(), self._num_heads, size)
        values_TF = torch.where(self._is_delayed_F, delayed_TF, qkv_TF[:, -num_values:])
        return torch.cat((mixed_TF.to(qkv_TF.dtype), values_TF), 1)


def _shared(qk_TF: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """Return the mean of each query and its key, and of each key and the mean of its queries."""
    qk_TJK = qk_TF.unflatten(-1, (-1, head_dim))
    q_THK, k_TGK = qk_TJK[:, :num_heads], qk_TJK[:, num_heads:]
    q_TGHK = q_THK.unflatten(1, (k_TGK.shape[1], -1))
    queries = (q_TGHK + k_TGK[:, :, None]) / 2
    return torch.cat((queries.flatten(1), queries.mean(2).flatten(1)), 1)


def read_head_taps(
    layer: HeadConvolutions,
    spec: ModelSpec,
    weights: WeightReader,
    prefix: str,
    shard: ModelShard,
) -> tuple[Tensor, Tensor]:
    """Return what a head's elements at each distance contribute to its elements, [J, L, K, K], and biases [J, K].

    A convolution of each channel is followed by one of each head. They are joined, because both are linear.
    """
    size, count = spec.head_dim, spec.num_heads + spec.num_kv_heads
    heads, kv_heads = shard.heads(spec), shard.kv_heads(spec)
    own = [*heads, *(spec.num_heads + i for i in kv_heads)]
    name, channels = f"{prefix}self_attn.conv_qk_", count * size
    bias_JK, second_bias_JK = (
        weights.read_float32(f"{name}{kind}.bias", channels).view(count, size)[own]
        for kind in ("depthwise", "grouped")
    )
    kernel, second_kernel = layer.channel_kernel, layer.head_kernel
    taps_JKA = weights.read_float32(f"{name}depthwise.weight", channels, 1, kernel)
    second_JKKB = weights.read_float32(f"{name}grouped.weight", channels, size, second_kernel)
    # From the token itself to the earliest one.
    taps_JKA = taps_JKA.view(count, size, kernel)[own].flip(-1)
    second_JKKB = second_JKKB.view(count, size, size, second_kernel)[own].flip(-1)
    joined_JLKK = taps_JKA.new_zeros(len(own), layer.kernel, size, size)
    for lag in range(second_kernel):
        each_JKKA = second_JKKB[..., lag, None] * taps_JKA[:, None]
        joined_JLKK[:, lag : lag + kernel] += each_JKKA.permute(0, 3, 2, 1)
    return joined_JLKK, second_bias_JK + (second_JKKB.sum(-1) @ bias_JK[..., None])[..., 0]
