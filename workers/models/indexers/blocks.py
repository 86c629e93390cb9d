"""The indexer of sparse attention by blocks of keys; see `BlockIndexerSpec`.

Shapes: T tokens of a step, G key/value heads of this shard, I elements of an index key, J index queries of a token, N
sequences for each key/value head, B blocks, P tokens of a block, A angles of a rotation, C the elements of all index
queries of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention import IndexQueries
from ...layers.layer_spec import LayerSpec
from ...layers.layers import HeadNorm, LayerNorm
from ...layers.parallel.tensor_parallel import elements
from ...layers.rope import RopeSpec, RotaryEmbedding, RotaryTables, apply_rotary
from ...layers.spec import ModelSpec
from ...layers.specs.block_indexer import BlockIndexerSpec
from ..weights import Rows, WeightReader


class BlockIndexer:
    """Computes the index keys of a layer, and the index queries by which its key/value heads choose blocks of keys.

    The layer's projection of hidden states ends with `rows`, which are `size` elements.
    """

    def __init__(
        self,
        spec: ModelSpec,
        indexer: BlockIndexerSpec,
        weights: WeightReader,
        prefix: str,
        kv_heads: range,
    ) -> None:
        self._indexer, self._num_heads, size = indexer, len(kv_heads), indexer.head_dim
        self.rows = block_index_rows(spec, indexer, prefix, kv_heads)
        self.size = (self._num_heads + 1) * size
        query_I, key_I = (
            weights.read_vector(f"{prefix}indexer.{name}.weight", size) + spec.norm_weight_offset
            for name in ("q_norm", "k_norm")
        )
        weight_HI = torch.stack([*[query_I] * self._num_heads, key_I])
        self._norm = HeadNorm(weight_HI, spec.norm_eps)

    def queries(
        self, x_TF: Tensor, positions_T: Tensor, tables: RotaryTables | None
    ) -> IndexQueries:
        """Return the index queries and keys, given their part of the projection."""
        x_THI = self._norm(x_TF.unflatten(-1, (-1, self._indexer.head_dim)))
        if tables is not None:
            x_THI = apply_rotary(x_THI, tables)
        queries_TGI, keys_T1I = x_THI.split((self._num_heads, 1), 1)
        indexer = self._indexer
        return IndexQueries(
            keys_T1I,
            queries_TGI.unsqueeze(2),
            None,
            indexer.num_chosen,
            indexer.block_size,
            indexer.num_local,
        )


class MeanIndexer:
    """Computes index keys, whose means represent blocks of keys, and the index queries that choose blocks.

    Every rank has the whole indexer. The layer's projection of hidden states ends with `rows`, which are `size`
    elements.
    """

    def __init__(
        self,
        spec: ModelSpec,
        indexer: BlockIndexerSpec,
        rope: RopeSpec,
        weights: WeightReader,
        prefix: str,
        kv_heads: range,
    ) -> None:
        self._indexer, self._num_kv_heads, size = indexer, len(kv_heads), indexer.head_dim
        self.size = (indexer.num_heads + 1) * size
        self.rows = mean_index_rows(indexer, prefix)
        self._query_norm, self._key_norm = (
            HeadNorm(
                weights.read_vector(f"{prefix}indexer.{each}_layernorm.weight", size).unsqueeze(0)
                + spec.norm_weight_offset,
                spec.norm_eps,
            )
            for each in "qk"
        )
        self._rope = RotaryEmbedding(
            rope,
            max_model_len=indexer.max_model_len,
            dtype=weights.dtype,
            device=weights.device,
        )

    def queries(
        self, x_TF: Tensor, positions_T: Tensor, tables: RotaryTables | None
    ) -> IndexQueries:
        """Return the index queries and keys, given their part of the projection."""
        assert tables is not None
        indexer = self._indexer
        x_THI = x_TF.unflatten(-1, (-1, indexer.head_dim))
        queries_TJI, keys_T1I = x_THI.split((indexer.num_heads, 1), 1)
        queries_TJI = apply_rotary(self._query_norm(queries_TJI), tables)
        queries_TGJI = queries_TJI.unsqueeze(1).expand(-1, self._num_kv_heads, -1, -1)
        if indexer.num_angles:
            cos_T1A, sin_T1A = (each[..., -indexer.num_angles :] for each in tables)
            keys_T1I = torch.cat((keys_T1I, cos_T1A, sin_T1A), -1)
        return IndexQueries(
            keys_T1I,
            queries_TGJI,
            torch.ones(1, device=x_TF.device).expand(queries_TGJI.shape[:-1]),
            indexer.num_chosen,
            indexer.block_size,
            summarize=self._keys_of_blocks,
        )

    def _keys_of_blocks(self, keys_NBPI: Tensor) -> Tensor:
        """Return the key of each block [N, B, I], given the index keys of its tokens and perhaps their rotation."""
        size, num_angles = self._indexer.head_dim, self._indexer.num_angles
        if num_angles:
            keys_NBPI, cos_NBPA, sin_NBPA = keys_NBPI.split((size, num_angles, num_angles), -1)
            cos, sin = cos_NBPA[:, :, :1], sin_NBPA[:, :, :1]
            tables = RotaryTables(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
        else:
            starts_B = torch.arange(keys_NBPI.shape[1], device=keys_NBPI.device)
            tables = self._rope.tables(starts_B * self._indexer.block_size)
        means_NB1I = keys_NBPI.float().mean(2, keepdim=True).to(self._rope.dtype)
        return apply_rotary(self._key_norm(means_NB1I), tables).squeeze(2)


class WeightedIndexer:
    """Computes index keys, whose weighted means represent blocks of keys, and the index queries that choose blocks.

    A rank has the queries of its key/value heads. The layer's projection of hidden states ends with `rows`, which are
    `size` elements.
    """

    def __init__(
        self,
        spec: ModelSpec,
        indexer: BlockIndexerSpec,
        weights: WeightReader,
        prefix: str,
        kv_heads: range,
    ) -> None:
        size, count = indexer.head_dim, indexer.heads_per_group
        heads = elements(kv_heads, count)
        self._indexer, self._sizes = indexer, (len(heads) * size, size, size, len(heads))
        self.rows = [
            Rows(f"{prefix}indexer.{name}", total, part, has_bias=False)
            for name, total, part in (
                ("q_proj", spec.num_kv_heads * count * size, elements(heads, size)),
                ("k_proj", size, range(size)),
                ("gate_proj", size, range(size)),
                ("weights_proj", spec.num_kv_heads * count, heads),
            )
        ]
        self.size = sum(self._sizes)
        weight_I = weights.read_vector(f"{prefix}indexer.q_norm.weight", size)
        self._query_norm = HeadNorm((weight_I + spec.norm_weight_offset)[None], spec.norm_eps)
        weight_I, bias_I = (
            weights.read_vector(f"{prefix}indexer.k_norm.{each}", size)
            for each in ("weight", "bias")
        )
        self._key_norm = LayerNorm(weight_I, spec.norm_eps, bias_I)
        assert indexer.rope is not None
        self._rope = RotaryEmbedding(
            indexer.rope,
            max_model_len=indexer.max_model_len,
            dtype=weights.dtype,
            device=weights.device,
        )

    def queries(
        self, x_TF: Tensor, positions_T: Tensor, tables: RotaryTables | None
    ) -> IndexQueries:
        """Return the index queries and keys, given their part of the projection."""
        indexer = self._indexer
        q_TC, k_TI, logits_TI, weights_TJ = x_TF.split(self._sizes, 1)
        tables = self._rope.tables(positions_T)
        q_TJI = self._query_norm(q_TC.unflatten(1, (-1, indexer.head_dim)))
        k_T1I = apply_rotary(self._key_norm(k_TI).unsqueeze(1), tables)
        groups = (-1, indexer.heads_per_group)
        return IndexQueries(
            torch.cat((k_T1I, logits_TI.unsqueeze(1)), -1),
            apply_rotary(q_TJI, tables).unflatten(1, groups),
            # A positive factor would not change the order of blocks.
            weights_TJ.unflatten(1, groups),
            indexer.num_chosen,
            indexer.block_size,
            summarize=weighted_means,
            keeps_own_block=True,
        )


def weighted_means(keys_NBPI: Tensor, biases: Tensor | float = 0.0) -> Tensor:
    """Return the key of each block [N, B, I], given the index keys of its tokens, and after them their logits.

    `biases` are added to the logits.
    """
    keys_NBPI, logits_NBPI = keys_NBPI.float().chunk(2, -1)
    return (keys_NBPI * (logits_NBPI + biases).softmax(2)).sum(2)


def read_block_indexer(
    spec: ModelSpec, layer: LayerSpec, weights: WeightReader, prefix: str, kv_heads: range
) -> BlockIndexer | MeanIndexer | WeightedIndexer | None:
    """Return the indexer of a layer with keys and values of heads; None if the layer has none."""
    indexer = spec.block_indexer
    if indexer is None or not layer.chooses_keys:
        return None
    if indexer.heads_per_group:
        return WeightedIndexer(spec, indexer, weights, prefix, kv_heads)
    if not indexer.num_heads:
        return BlockIndexer(spec, indexer, weights, prefix, kv_heads)
    assert layer.rope is not None
    return MeanIndexer(spec, indexer, layer.rope, weights, prefix, kv_heads)


def mean_index_rows(indexer: BlockIndexerSpec, prefix: str) -> list[Rows]:
    """Return the rows of the projection to a token's index queries and its index key."""
    key_size = indexer.head_dim
    sizes = {"index_qk_proj": (indexer.num_heads + 1) * key_size}
    if indexer.has_two_matrices:
        sizes = {"q_proj": indexer.num_heads * key_size, "k_proj": key_size}
    return [
        Rows(f"{prefix}indexer.{name}", size, range(size), has_bias=False)
        for name, size in sizes.items()
    ]


def block_index_rows(
    spec: ModelSpec, indexer: BlockIndexerSpec, prefix: str, kv_heads: range
) -> list[Rows]:
    """Return the rows of the projections to the index queries of these heads, and to the index key."""
    size = indexer.head_dim
    part = elements(kv_heads, size)
    return [
        Rows(f"{prefix}indexer.q_proj", spec.num_kv_heads * size, part, has_bias=False),
        Rows(f"{prefix}indexer.k_proj", size, range(size), has_bias=False),
    ]
