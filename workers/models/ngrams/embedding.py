"""The embeddings of n-grams in one layer; see `NgramSpec`.

Shapes: T tokens of a step, L tokens of the longest n-gram, H embeddings of a token.
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
        sizes_H = torch.tensor(ngrams.head_sizes(table), device=weights.device)
        self._sizes = sizes_H.split(ngrams.num_heads)
        self._offsets_H = sizes_H.cumsum(0) - sizes_H
        self._multipliers = ngrams.multipliers(spec.vocab_size, table)
        self._end_id = ngrams.end_id
        self._classes_V: Tensor | None = None
        if ngrams.num_classes:
            # Only these models need the tokenizers library in a worker.
            from .classes import token_classes

            classes = token_classes(weights.checkpoint.path, spec.vocab_size, ngrams.num_classes)
            self._end_id = int(classes[ngrams.end_id])
            self._classes_V = torch.from_numpy(classes).to(weights.device)
        num_rows, size = ngrams.num_rows(table), ngrams.size // ngrams.num_all_heads
        part = shard.tensor_parallel.part(num_rows)
        name = f"{prefix}ple_embedding.ngram_embedding.weight"
        rows = weights.read_table(name, num_rows, size, part)
        self._embed = VocabParallelEmbedding(rows, num_rows, shard.tensor_parallel)

    def __call__(self, ids_TL: Tensor) -> Tensor:
        """Return the concatenated embeddings of tokens, [T, size].

        `ids_TL` has each token and those before it, the last one first; negative where there is none.
        """
        rows_TH = self._rows(ids_TL)
        return self._embed(rows_TH.flatten()).view(len(rows_TH), -1)

    def _rows(self, ids_TL: Tensor) -> Tensor:
        hash_T = torch.zeros_like(ids_TL[:, 0])
        is_outside_T = torch.zeros_like(hash_T, dtype=torch.bool)
        rows = []
        for distance, multiplier in enumerate(self._multipliers):
            ids_T = ids_TL[:, distance]
            is_outside_T = is_outside_T | (ids_T < 0)
            if self._classes_V is not None:
                ids_T = self._classes_V[ids_T.clamp(min=0)]
            ids_T = ids_T.masked_fill(is_outside_T, self._end_id)
            hash_T = hash_T ^ (ids_T * multiplier)
            if distance and self._classes_V is None:
                is_outside_T = is_outside_T | (ids_T == self._end_id)
            if distance:
                rows.append(hash_T.unsqueeze(1) % self._sizes[distance - 1])
        return torch.cat(rows, 1) + self._offsets_H
