"""The gated delta net (Yang et al., 2024, arXiv 2412.06464): a delta rule with one decay per head and token.

Shapes: T tokens of a step, D hidden size, N segments, C tokens of a segment, H value heads and G key heads of this
shard, K key dimension, V value dimension, F channels of an input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.recurrent_layers import GatedDeltaNet
from ...layers.parallel.tensor_parallel import TensorParallel, elements
from ..layer_source import LayerSource
from ..weights import Rows, WeightReader
from .delta_rule import delta_rule, unit
from .mixer import Mixer, MixerRows, segments
from .states import StateBatch, StateCache


class GatedDeltaNetMixer(Mixer):
    """Linear attention with the delta rule and one decay per head and token."""

    def __init__(self, layer: GatedDeltaNet, source: LayerSource) -> None:
        super().__init__(layer, source)
        spec, weights, prefix, shard, _ = source
        self._layer = layer
        heads = head_runs(layer, shard.tensor_parallel)
        self._num_heads = sum(map(len, heads))
        self._num_key_heads = len(shard.tensor_parallel.part(layer.num_key_heads))
        log_decay_H, self._step_bias_H = (
            torch.cat([weights.read_vector(prefix + name, layer.num_heads, run) for run in heads])
            for name in ("A_log", "dt_bias")
        )
        self._a_H = -log_decay_H.exp()
        weight_V = weights.read_vector(f"{prefix}norm.weight", layer.value_dim)
        self._norm_V = (weight_V + layer.norm_offset) * layer.norm_factor
        self._norm_eps = spec.norm_eps if layer.norm_eps is None else layer.norm_eps
        self._gate = torch.sigmoid if layer.has_sigmoid_gate else F.silu

    @staticmethod
    def rows(
        layer: GatedDeltaNet, weights: WeightReader, prefix: str, tensor_parallel: TensorParallel
    ) -> MixerRows:
        """See `Mixer.rows`. The projections are those to queries, keys, values, strengths, time steps and gates."""
        heads = head_runs(layer, tensor_parallel)
        key_heads = tensor_parallel.part(layer.num_key_heads)
        keys = elements(key_heads, layer.key_dim)
        values = [elements(run, layer.value_dim) for run in heads]
        key_size, value_size = (
            layer.num_key_heads * layer.key_dim,
            layer.num_heads * layer.value_dim,
        )
        sizes = [key_size, key_size, value_size]
        parts = [[keys, keys, own] for own in values]
        if weights.has(f"{prefix}in_proj.weight"):
            query, key, value, own_gate, *steps = segments(
                f"{prefix}in_proj",
                [*sizes, value_size, layer.num_heads, layer.num_heads],
                [keys, keys, *values, *values, *heads, *heads],
            )
            qkv, gate = [query, key, value], [own_gate]
        else:
            repeats = layer.num_heads // layer.num_key_heads
            if layer.is_interleaved:
                of_head = [layer.key_dim] * 2 + [repeats * layer.value_dim] * 2
                *qkv, own_gate = _interleaved_rows(
                    f"{prefix}in_proj_qkvz", layer, of_head, key_heads
                )
                gate = [own_gate]
            else:
                names = ["q_proj", "k_proj", "v_proj"]
                qkv = _with_all_values(weights.rows(prefix, names, sizes, own) for own in parts)
                gate = [Rows(f"{prefix}in_proj_z", value_size, own) for own in values]
            if layer.has_interleaved_steps:
                steps = _interleaved_rows(f"{prefix}in_proj_ba", layer, [repeats] * 2, key_heads)
            else:
                steps = [
                    Rows(f"{prefix}in_proj_{each}", layer.num_heads, run)
                    for each in "ba"
                    for run in heads
                ]
        # The convolutions may be stored as one tensor.
        convolution = _with_all_values(segments(f"{prefix}conv1d", sizes, own) for own in parts)
        if weights.has(f"{prefix}q_conv1d.weight"):
            names = [f"{prefix}{each}_conv1d" for each in "qkv"]
            stored = [weights.num_rows(*each) for each in zip(names, sizes, strict=True)]
            if sum(stored) == sum(sizes):
                convolution = [
                    piece for each in convolution for piece in _divided(each.part, names, stored)
                ]
            else:
                convolution = [Rows(*each) for each in zip(names, sizes, parts[0], strict=True)]
        return MixerRows(
            [*qkv, *steps, *gate],
            convolution,
            layer.num_heads,
            layer.value_dim,
            num_runs=len(heads),
        )

    def forward(self, x: Any, memory: Tensor, batch: StateBatch) -> Tensor:
        """See `Mixer.forward`."""
        layer, num_heads = self._layer, self._num_heads
        key_size, value_size = self._num_key_heads * layer.key_dim, num_heads * layer.value_dim
        inputs_TF, gate_TX = self.projection(x).split((self._size.channels, value_size), -1)
        dtype = inputs_TF.dtype
        cache = StateCache(memory, self._size, dtype)
        inputs_NXF = cache.all_inputs(inputs_TF, batch)[batch.inputs_of_segments]
        qkv_NXF, strength_NXH, step_NXH = inputs_NXF.split(
            (2 * key_size + value_size, num_heads, num_heads), -1
        )
        qkv_NCF = F.silu(self._conv(qkv_NXF)).to(dtype).float()
        q_NCX, k_NCX, v_NCX = qkv_NCF.split((key_size, key_size, value_size), -1)
        window = layer.kernel - 1
        strength_NCH = strength_NXH[:, window:].sigmoid().float()
        if layer.has_negative_eigenvalues:
            strength_NCH = strength_NCH * 2.0
        step_NCH = F.softplus(step_NXH[:, window:].float() + self._step_bias_H) * self._a_H
        y_NHCV = delta_rule(
            self._heads(unit(q_NCX, layer.key_dim) * layer.key_dim**-0.5),
            self._heads(unit(k_NCX, layer.key_dim)),
            v_NCX.unflatten(-1, (num_heads, -1)).transpose(1, 2),
            strength_NCH.transpose(1, 2).unsqueeze(-1),
            step_NCH.transpose(1, 2).cumsum(-1).unsqueeze(-1),
            cache,
            batch,
        )
        y_THV = y_NHCV.transpose(1, 2).flatten(0, 1)[batch.tokens].to(dtype).float()
        y_THV = torch.rms_norm(y_THV, (layer.value_dim,), self._norm_V, self._norm_eps)
        gate_THV = self._gate(gate_TX.float()).unflatten(-1, (num_heads, -1))
        return self._output((y_THV * gate_THV).to(dtype).flatten(1))

    def _heads(self, x_NCGK: Tensor) -> Tensor:
        """Return queries or keys [N, H, C, K] of every value head."""
        repeats = self._num_heads // self._num_key_heads
        if self._layer.has_tiled_heads:
            return x_NCGK.repeat(1, 1, repeats, 1).transpose(1, 2)
        return x_NCGK.repeat_interleave(repeats, 2).transpose(1, 2)


def head_runs(layer: GatedDeltaNet, tensor_parallel: TensorParallel) -> list[range]:
    """Return this rank's value heads, which share its key heads, as runs of consecutive heads.

    There are several runs if GGUF files have the first value head of each key head first.
    """
    if not layer.has_tiled_heads or tensor_parallel.size == 1:
        return [tensor_parallel.part(layer.num_heads)]
    own = tensor_parallel.part(layer.num_key_heads)
    starts = range(0, layer.num_heads, layer.num_key_heads)
    return [range(start + own.start, start + own.stop) for start in starts]


def _with_all_values(runs: Iterable[list[Rows]]) -> list[Rows]:
    """Return the rows of queries and keys, and those of all runs of values."""
    (query, key, value), *others = runs
    return [query, key, value, *(rows[2] for rows in others)]


def _divided(part: range, names: Sequence[str], sizes: Sequence[int]) -> list[Rows]:
    """Return the rows `part` of modules that are joined, as rows of each module.

    transformers saves the joined convolution of queries, keys and values in three equal parts, even if the number of
    channels of values differs from that of keys.
    """
    rows, start = [], 0
    for name, size in zip(names, sizes, strict=True):
        own = range(max(part.start - start, 0), min(part.stop - start, size))
        if own:
            rows.append(Rows(name, size, own))
        start += size
    return rows


def _interleaved_rows(
    name: str, layer: GatedDeltaNet, sizes: list[int], key_heads: range
) -> list[Rows]:
    """Return the rows of matrices stored key head by key head, with `sizes` rows of each per key head."""
    size = sum(sizes)
    stored = torch.arange(len(key_heads) * size).view(-1, size).split(sizes, 1)
    total, part = size * layer.num_key_heads, elements(key_heads, size)
    return [Rows(name, total, part, order.flatten()) for order in stored]
