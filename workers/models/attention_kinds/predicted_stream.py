"""Attention of two hidden states of each token, of which the second one predicts the next token (ProphetNet).

The first one attends to the tokens up to its own, as usual. The second one stands at the next position. It attends to
the first states of the same tokens, and to itself. So only the keys and values of first states are stored. The values
in the cache have one more element, which is 1. Its mean is the share of the attention that does not go to the state
itself.

Shapes: T tokens of a step, S = 2 T states, D hidden size, H heads of this shard, K elements of a head, P stored
elements of a head, B buckets of distances, E distances, X outputs of an encoder.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from ...attention import AttentionBackend, AttentionLayer
from ...layers.distance_buckets import distance_buckets
from ...layers.parallel.tensor_parallel import elements
from ...layers.specs.relative_biases import PredictedStreamSpec
from ..cross_attention import CrossAttention
from ..layer_source import LayerSource

_PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj")


class PredictedStreamAttention:
    """Attention with biases that depend on the query and on the range of its distance to the key."""

    def __init__(
        self, stream: PredictedStreamSpec, source: LayerSource, backend: AttentionBackend
    ) -> None:
        spec, weights, prefix, shard, kernels = source
        self._backend = backend
        self._size, self._padding = stream.head_dim, spec.head_dim - stream.head_dim
        self._layer = AttentionLayer(spec.attention_scale)
        heads = shard.kv_heads(spec)
        total, part = spec.num_kv_heads * self._size, elements(heads, self._size)
        rows = weights.rows(prefix, [*_PROJECTIONS], [total] * 3, [part] * 3)
        self._project = source.read_rows(rows, spec.hidden_size, has_biases=True)
        self._output = source.read_columns("o_proj", spec.hidden_size, total, part, has_bias=True)
        # The rows of a bucket are those of all heads.
        count, name = stream.num_buckets, f"{prefix}relative_pos_embeddings"
        shape = count * spec.num_kv_heads, spec.hidden_size
        own = slice(heads.start, heads.stop)
        matrix_BHD = weights.read(f"{name}.weight", *shape).unflatten(0, (count, -1))[:, own]
        bias_BH = weights.read(f"{name}.bias", shape[0]).unflatten(0, (count, -1))[:, own]
        self._to_biases = kernels.linear(matrix_BHD.flatten(0, 1), bias_BH.flatten())
        self._num_buckets = count
        distances = -torch.arange(spec.max_position_embeddings + 1, device=matrix_BHD.device)
        buckets = distance_buckets(distances, count, stream.max_distance, is_causal=True)
        self._buckets_2E = torch.stack((buckets[:-1], buckets[1:]))

    def forward(self, x_SD: Tensor, kv_cache: Tensor, metadata: Any) -> Tensor:
        """Return the outputs [S, D] of the states, which are next to each other for each token."""
        size = self._size
        qkv_T23HK = self._project(x_SD).unflatten(-1, (3, -1, size)).unflatten(0, (-1, 2))
        q_TH2K = qkv_T23HK[:, :, 0].transpose(1, 2)
        k_T2HK, v_T2HK = qkv_T23HK[:, :, 1:].unbind(2)
        biases_T2BH = self._to_biases(x_SD).float().unflatten(-1, (self._num_buckets, -1))
        biases_T2BH = biases_T2BH.unflatten(0, (-1, 2))
        biases_TH2E = torch.stack(
            [biases_T2BH[:, i][:, self._buckets_2E[i]].transpose(1, 2) for i in range(2)], 2
        )
        own_TH = (q_TH2K[:, :, 1] * k_T2HK[:, 1]).sum(-1, dtype=torch.float32) * self._layer.scale
        own_TH = own_TH + biases_T2BH[:, 1, 0]
        sinks_TH2 = torch.stack((torch.full_like(own_TH, -torch.inf), own_TH), 2)
        layer = replace(
            self._layer,
            query_biases_THE=biases_TH2E.flatten(1, 2),
            sinks_TH=sinks_TH2.flatten(1),
        )
        k_THP, v_THP = (F.pad(x[:, 0], (0, self._padding)) for x in (k_T2HK, v_T2HK))
        v_THP[..., size] = 1.0
        q_TXP = F.pad(q_TH2K.flatten(1, 2), (0, self._padding))
        attended_TXP = self._backend.forward(q_TXP, k_THP, v_THP, kv_cache, metadata, layer)
        attended_TH2P = attended_TXP.unflatten(1, (-1, 2))
        out_T2HK = attended_TH2P[..., :size].transpose(1, 2).clone()
        share_TH1 = 1.0 - attended_TH2P[:, :, 1, size, None]
        out_T2HK[:, 1] += share_TH1 * v_T2HK[:, 1]
        return self._output(out_T2HK.flatten(2).flatten(0, 1))


class PredictedStreamReader(CrossAttention):
    """Attention of both states to the outputs of an encoder. They share keys and values."""

    def __init__(
        self, stream: PredictedStreamSpec, source: LayerSource, backend: AttentionBackend
    ) -> None:
        spec, weights, prefix, shard, _ = source
        self.index, self.recorder, self.reads_T1 = 0, None, None
        self._backend = backend.as_bidirectional()
        self._layer = AttentionLayer(spec.attention_scale)
        self._head_dim, self._padding = stream.head_dim, spec.head_dim - stream.head_dim
        total = spec.num_kv_heads * stream.head_dim
        part = elements(shard.kv_heads(spec), stream.head_dim)
        rows = weights.rows(prefix, [*_PROJECTIONS], [total] * 3, [part] * 3)
        self.queries = source.read_rows(rows[:1], spec.hidden_size, has_biases=True)
        self._keys_and_values = source.read_rows(rows[1:], spec.hidden_size, has_biases=True)
        self._output = source.read_columns("o_proj", spec.hidden_size, total, part, has_bias=True)

    def store(self, encoded_ED: Tensor, kv_cache: Tensor, metadata: Any) -> None:
        """See `CrossAttention`."""
        kv_X2HK = self._keys_and_values(encoded_ED).unflatten(-1, (2, -1, self._head_dim))
        k_XHP, v_XHP = F.pad(kv_X2HK, (0, self._padding)).unbind(1)
        self._backend.store(k_XHP, v_XHP, kv_cache, metadata, self._layer)

    def forward(self, x: Any, kv_cache: Tensor, metadata: Any) -> Tensor:
        """Return the outputs [S, D]. The recorder gets no queries."""
        q_T2HK = self.queries(x).unflatten(-1, (-1, self._head_dim)).unflatten(0, (-1, 2))
        q_TXP = F.pad(q_T2HK.transpose(1, 2).flatten(1, 2), (0, self._padding))
        attended_TXP = self._backend.attend(q_TXP, kv_cache, metadata, self._layer)
        out_TH2K = attended_TXP.unflatten(1, (-1, 2))[..., : self._head_dim]
        return self._output(out_TH2K.transpose(1, 2).flatten(2).flatten(0, 1))
