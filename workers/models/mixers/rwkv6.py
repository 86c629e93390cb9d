"""The time mixing of RWKV-6 (Peng et al., 2024, arXiv 2404.05892): linear attention with one decay per key element.

Shapes: T tokens of a step, D hidden size, M mixtures, R elements of a mixture's low-rank projection, N segments,
C tokens of a segment, H heads of this shard, K elements of a key, V of a value, I elements of all heads of this shard,
F channels of an input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.recurrent_layers import Rwkv6
from ...layers.parallel.tensor_parallel import TensorParallel, elements
from ..layer_source import LayerSource
from ..weights import WeightReader
from .delta_rule import decayed_products
from .mixer import Mixer, MixerRows
from .rwkv7 import LowRank
from .states import StateBatch, StateCache


class Rwkv6Mixer(Mixer):
    """Linear attention whose products read mixtures of two tokens' hidden states, which depend on these states."""

    def __init__(self, layer: Rwkv6, source: LayerSource) -> None:
        super().__init__(layer, source)
        _, weights, prefix, shard, kernels = source
        heads, size = shard.tensor_parallel.part(layer.num_heads), layer.hidden_size
        own, own_keys = elements(heads, layer.head_dim), elements(heads, layer.key_dim)
        key_size, count, rank = (
            layer.num_heads * layer.key_dim,
            len(layer.mixtures),
            layer.mix_rank,
        )
        self._layer, self._num_heads = layer, len(heads)
        self._base_D = weights.read_elements(f"{prefix}x_proj.0.mu", size)
        self._bases_MD = weights.read_elements(f"{prefix}x_bias", count * size).view(count, size)
        self._down = source.read_linear("x_proj.0.linear", count * rank, size)
        self._ups = [kernels.linear(each) for each in _read_ups(layer, weights, prefix)]
        # Heads that share keys and values are next to each other.
        group = layer.num_heads // (layer.num_kv_heads or layer.num_heads)
        shared = range(heads.start // group, -(-heads.stop // group))
        first = heads.start - shared.start * group
        self._group, self._own_heads = group, slice(first, first + len(heads))
        shapes = {
            "r": (key_size, size, own_keys),
            "k": (key_size // group, size, elements(shared, layer.key_dim)),
            "v": (size // group, size, elements(shared, layer.head_dim)),
            "g": (size, size, own),
        }
        self._products = {
            name: source.read_linear(
                f"{name}_proj.linear", *shape, has_bias=layer.has_biases and name != "g"
            )
            for name, shape in shapes.items()
        }
        self._decay = LowRank(
            source.at("w_proj.linear.lora."), layer.decay_rank, key_size, own_keys, has_bias=True
        )
        if layer.reads_own:
            return
        bonus_E = weights.read_elements(f"{prefix}bonus", key_size)
        self._bonus_HK = bonus_E[own_keys.start : own_keys.stop].view(len(heads), -1)
        self._norm = [
            weights.read_vector(f"{prefix}norm.{name}", size, own).view(len(heads), -1)
            for name in ("weight", "bias")
        ]

    @staticmethod
    def rows(
        layer: Rwkv6, weights: WeightReader, prefix: str, tensor_parallel: TensorParallel
    ) -> MixerRows:
        """See `Mixer.rows`. Each product reads its own input, so there is no joint projection."""
        return MixerRows([], [], layer.num_heads, layer.head_dim)

    def forward(self, x: Any, memory: Tensor, batch: StateBatch) -> Tensor:
        """See `Mixer.forward`."""
        layer, dtype = self._layer, x.dtype
        of_hidden, of_heads = StateCache(memory, self._size, dtype).split(layer.hidden_size)
        x_TD = x.float()
        difference_TD = of_hidden.previous(x, batch).float() - x_TD
        base_TD = torch.addcmul(x_TD, difference_TD, self._base_D).to(dtype)
        low_ranks = self._down(base_TD).tanh().chunk(len(layer.mixtures), -1)
        mixed = {
            name: torch.addcmul(x_TD, difference_TD, up(low_rank).float() + bias_D).to(dtype)
            for name, up, low_rank, bias_D in zip(
                layer.mixtures,
                self._ups,
                (each.contiguous() for each in low_ranks),
                self._bases_MD,
                strict=True,
            )
        }
        log_decay_TI = -self._decay(mixed["w"], torch.tanh).exp()
        q_TI, k_TI, v_TI, gate_TI = (self._products[name](mixed[name]) for name in "rkvg")
        if layer.reads_own:
            q_TI = q_TI * layer.key_dim**-0.5
            k_TI, v_TI = self._repeat(k_TI, layer.key_dim), self._repeat(v_TI, layer.head_dim)
            k_TI = -k_TI * torch.expm1(log_decay_TI).to(dtype)
        keys, values = (self._num_heads * size for size in (layer.key_dim, layer.head_dim))
        inputs_TF = torch.cat((q_TI, log_decay_TI.to(dtype), k_TI, v_TI), -1)
        of_heads, _ = of_heads.split(3 * keys + values)
        inputs_NCF = of_heads.all_inputs(inputs_TF, batch)[batch.inputs_of_segments[:, 1:]]
        q, log_decay, k, v = (
            part.unflatten(-1, (self._num_heads, -1)).transpose(1, 2)
            for part in inputs_NCF.float().split((keys, keys, keys, values), -1)
        )
        y_NCHV = self._scan(q, k, v, log_decay, of_heads, batch).transpose(1, 2)
        activate = torch.sigmoid if layer.reads_own else F.silu
        if not layer.reads_own:
            weight_HV, bias_HV = self._norm
            normed = F.layer_norm(y_NCHV, y_NCHV.shape[-1:], None, None, layer.norm_eps)
            y_NCHV = torch.addcmul(bias_HV, normed, weight_HV)
        y_TI = y_NCHV.flatten(2).flatten(0, 1)[batch.tokens]
        return self._output((y_TI * activate(gate_TI.float())).to(dtype))

    def _repeat(self, x_TI: Tensor, size: int) -> Tensor:
        """Return the keys or values of all heads of this shard, of which several may share them."""
        x_THX = x_TI.unflatten(-1, (-1, size)).repeat_interleave(self._group, 1)
        return x_THX[:, self._own_heads].flatten(1)

    def _scan(
        self,
        q_NHCK: Tensor,
        k_NHCK: Tensor,
        v_NHCV: Tensor,
        log_decay_NHCK: Tensor,
        cache: StateCache,
        batch: StateBatch,
    ) -> Tensor:
        """Update the states, and return the outputs of all tokens of all segments.

        A token reads the state before its own decay, and its own value with a bonus, unless the layer `reads_own`.
        """
        log_decays_NHCK = log_decay_NHCK.cumsum(-2)
        if self._layer.reads_own:
            [scores_NHCC] = decayed_products((q_NHCK,), k_NHCK, log_decays_NHCK)
            y_NHCV = scores_NHCC @ v_NHCV
            q_NHCK = q_NHCK * log_decays_NHCK.exp()
        else:
            # The query of a token belongs to the decays up to the token before it.
            next_NHCK = F.pad(q_NHCK[..., 1:, :], (0, 0, 0, 1))
            [scores_NHCC] = decayed_products((next_NHCK,), k_NHCK, log_decays_NHCK)
            scores_NHCC = F.pad(scores_NHCC[..., :-1, :], (0, 0, 1, 0))
            bonus_NHC1 = (q_NHCK * k_NHCK * self._bonus_HK[:, None]).sum(-1, keepdim=True)
            y_NHCV = torch.addcmul(scores_NHCC @ v_NHCV, bonus_NHC1, v_NHCV)
            q_NHCK = q_NHCK * F.pad(log_decays_NHCK[..., :-1, :], (0, 0, 1, 0)).exp()
        last_NH1K = log_decays_NHCK[..., -1:, :]
        keys_NHKC = (k_NHCK * (last_NH1K - log_decays_NHCK).exp()).transpose(-1, -2)
        last_NHK1 = last_NH1K.exp().transpose(-1, -2)
        added_NHKV = keys_NHKC @ v_NHCV
        states_SHKV = cache.load(batch).unflatten(1, (self._num_heads, -1, v_NHCV.shape[-1]))
        for part in batch.rounds:
            states_RHKV = states_SHKV[part.requests]
            y_NHCV.index_add_(0, part.segments, q_NHCK[part.segments] @ states_RHKV)
            if part.num_full:
                full = part.segments[: part.num_full]
                decayed_RHKV = states_RHKV[: part.num_full] * last_NHK1[full]
                part.replace_states(states_SHKV, decayed_RHKV + added_NHKV[full])
        cache.store(states_SHKV.flatten(1), batch)
        return y_NHCV


def _read_ups(layer: Rwkv6, weights: WeightReader, prefix: str) -> list[Tensor]:
    """Return each mixture's second matrix [D, R]. They are stored side by side, or one after the other in GGUF."""
    size, count, rank = layer.hidden_size, len(layer.mixtures), layer.mix_rank
    if weights.has(name := f"{prefix}x_proj.2.stacked"):
        return list(weights.read(name, count * size, rank).view(count, size, rank).unbind())
    matrix_DX = weights.read(f"{prefix}x_proj.2.weight", size, count * rank)
    return [each.contiguous() for each in matrix_DX.chunk(count, -1)]
