"""The embeddings of n-grams in one layer; see `NgramSpec`.

Shapes: T tokens of a step, S segments, C tokens of a segment, W tokens before a segment, H embeddings of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layers.parallel.parallel_layers import VocabParallelEmbedding
from ...layers.parallel.shard import ModelShard
from ...layers.spec import ModelSpec
from ...layers.specs.ngram import NgramSpec
from ..weights import WeightReader


class NgramEmbedding:
    """The embeddings that hashes of the last tokens choose. Each rank has a part of the table's rows."""

    def __init__(
        self,
        spec: ModelSpec,
        ngrams: NgramSpec,
        table: int,
        weights: WeightReader,
        prefix: str,
        shard: ModelShard,
    ) -> None:
        self._ngrams = ngrams
        head_sizes = ngrams.head_sizes(table)
        sizes_H = torch.tensor(head_sizes, device=weights.device)
        self._sizes = sizes_H.split(ngrams.num_heads)
        self._offsets_H = sizes_H.cumsum(0) - sizes_H
        self._multipliers = ngrams.multipliers(spec.vocab_size, table)
        num_rows, size = ngrams.num_rows(head_sizes), ngrams.size // ngrams.num_all_heads
        part = shard.tensor_parallel.part(num_rows)
        name = f"{prefix}ple_embedding.ngram_embedding.weight"
        rows = weights.read_table(name, num_rows, size, part)
        self._embed = VocabParallelEmbedding(rows, num_rows, shard.tensor_parallel)

    def __call__(self, ids_SX: Tensor, length: int, tokens_T: Tensor) -> Tensor:
        """Return the concatenated embeddings of tokens, [T, size].

        Args:
            ids_SX: The tokens of segments and the W tokens before each; negative where there is none.
            length: The number of tokens of a segment, C.
            tokens_T: The indices of the tokens in the segments.
        """
        rows_TH = self._rows(ids_SX, length, tokens_T)
        return self._embed(rows_TH.flatten()).view(len(rows_TH), -1)

    def _rows(self, ids_SX: Tensor, length: int, tokens_T: Tensor) -> Tensor:
        end_id, window = self._ngrams.end_id, ids_SX.shape[1] - length
        hash_T = torch.zeros_like(tokens_T)
        is_after_end_T = torch.zeros_like(tokens_T, dtype=torch.bool)
        rows = []
        for distance, multiplier in enumerate(self._multipliers):
            start = window - distance
            ids_T = ids_SX[:, start : start + length].flatten()[tokens_T]
            ids_T = ids_T.masked_fill(is_after_end_T | (ids_T < 0), end_id)
            hash_T = hash_T ^ (ids_T * multiplier)
            if distance:
                is_after_end_T = is_after_end_T | (ids_T == end_id)
                rows.append(hash_T.unsqueeze(1) % self._sizes[distance - 1])
        return torch.cat(rows, 1) + self._offsets_H
