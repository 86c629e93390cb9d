"""Attention of a decoder's tokens to the outputs of an encoder (arXiv 1706.03762).

Shapes: T tokens of a step, E outputs of an encoder, D hidden size, H query heads and G key/value heads of this shard,
K head dimension.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from ..attention import AttentionBackend, AttentionLayer
from ..layers.layers import RMSNorm
from ..layers.parallel.shard import ModelShard
from ..layers.parallel.tensor_parallel import elements
from ..layers.spec import ModelSpec
from .layer_source import LayerSource
from .weights import Rows, WeightReader


class QueryRecorder(Protocol):
    """Receives the queries of cross attention. `Alignments` implements this protocol."""

    def record(self, layer: int, q_THK: Tensor) -> None:
        """Receive the queries of the step's tokens in one layer, before they are scaled."""


class CrossAttention:
    """The projection of queries, attention and the output projection. Keys and values are stored when a request starts.

    `recorder` receives the queries of all steps, together with the layer's `index`. If the outputs are those of images,
    `reads_T1` says which tokens of the step have an image before them; None if none has.
    """

    def __init__(self, source: LayerSource, backend: AttentionBackend) -> None:
        spec, weights, prefix, shard, _ = source
        assert spec.source is not None
        self.index = 0
        self.recorder: QueryRecorder | None = None
        self.reads_T1: Tensor | None = None
        self._norms: list[RMSNorm] = []
        if spec.source.has_norms:
            names = (f"{prefix}{name}_norm.weight" for name in "qk")
            vectors = (weights.read_vector(name, spec.head_dim) for name in names)
            self._norms = [RMSNorm(vector_K, spec.norm_eps) for vector_K in vectors]
        self._backend = backend.as_bidirectional()
        self._layer = AttentionLayer(spec.attention_scale, softcap=spec.attention_softcap)
        self._head_dim = spec.head_dim
        self._num_kv_heads = len(shard.kv_heads(spec))
        query_rows, kv_rows = cross_rows(spec, weights, prefix, shard)
        source_size = spec.source.hidden_size
        has_biases = spec.qkv_bias
        self.queries = source.read_rows([query_rows], spec.hidden_size, has_biases=has_biases)
        self._keys_and_values = source.read_rows(kv_rows, source_size, has_biases=has_biases)
        self._output = source.read_columns(
            "o_proj",
            spec.hidden_size,
            query_rows.total,
            query_rows.part,
            has_bias=spec.attention_output_bias,
        )

    def store(self, encoded_ED: Tensor, kv_cache: Tensor, metadata: Any) -> None:
        """Store the keys and values of an encoder's outputs. `metadata` describes a sequence with as many tokens."""
        kv_EGK = self._keys_and_values(encoded_ED).unflatten(-1, (-1, self._head_dim))
        k_EGK, v_EGK = kv_EGK.split(self._num_kv_heads, 1)
        if self._norms:
            k_EGK = self._norms[1](k_EGK)
        self._backend.store(k_EGK, v_EGK, kv_cache, metadata, self._layer)

    def forward(self, x: Any, kv_cache: Tensor, metadata: Any) -> Tensor:
        """Return the output [T, D], also for tokens without anything to read."""
        q_THK = self.queries(x).unflatten(-1, (-1, self._head_dim))
        if self._norms:
            q_THK = self._norms[0](q_THK)
        if self.recorder is not None:
            self.recorder.record(self.index, q_THK)
        return self._output(self._backend.attend(q_THK, kv_cache, metadata, self._layer).flatten(1))


def cross_rows(
    spec: ModelSpec, weights: WeightReader, prefix: str, shard: ModelShard
) -> tuple[Rows, list[Rows]]:
    """Return this rank's rows of the projections to queries, and to keys and values, which may be one matrix."""
    heads, kv_heads = (
        elements(part, spec.head_dim) for part in (shard.heads(spec), shard.kv_heads(spec))
    )
    query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if weights.has(f"{prefix}k_v_proj.weight"):
        names, sizes = ("k_proj", "v_proj"), (kv_size, kv_size)
        keys_and_values = weights.rows(prefix, names, sizes, (kv_heads, kv_heads))
        return Rows(f"{prefix}q_proj", query_size, heads), keys_and_values
    keys_and_values = [
        Rows(f"{prefix}k_proj", kv_size, kv_heads, has_bias=spec.key_bias),
        Rows(f"{prefix}v_proj", kv_size, kv_heads),
    ]
    return Rows(f"{prefix}q_proj", query_size, heads), keys_and_values
