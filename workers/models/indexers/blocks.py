"""The indexer of sparse attention by blocks of keys; see `BlockIndexerSpec`.

Shapes: T tokens of a step, G key/value heads of this shard, I elements of an index key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention import IndexQueries
from ...layers.block_indexer_spec import BlockIndexerSpec
from ...layers.layers import HeadNorm
from ...layers.rope import RotaryTables, apply_rotary
from ...layers.spec import ModelSpec
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

    def queries(self, x_TF: Tensor, tables: RotaryTables | None) -> IndexQueries:
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


def block_index_rows(
    spec: ModelSpec, indexer: BlockIndexerSpec, prefix: str, kv_heads: range
) -> list[Rows]:
    """Return the rows of the projections to the index queries of these heads, and to the index key."""
    size = indexer.head_dim
    part = range(kv_heads.start * size, kv_heads.stop * size)
    return [
        Rows(f"{prefix}indexer.q_proj", spec.num_kv_heads * size, part, has_bias=False),
        Rows(f"{prefix}indexer.k_proj", size, range(size), has_bias=False),
    ]
