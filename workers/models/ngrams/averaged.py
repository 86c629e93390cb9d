"""Embeddings of n-grams that are averaged with that of the token; see `AveragedNgramSpec`.

Shapes: T tokens of a step, W tokens before each, D hidden size, H embeddings of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layers.parallel.parallel_layers import VocabParallelEmbedding
from ...layers.specs.ngram import AveragedNgramSpec
from ..layer_source import LayerSource


class AveragedNgrams:
    """The embeddings that the last tokens choose. Each rank has a part of the rows of every table."""

    def __init__(self, ngrams: AveragedNgramSpec, source: LayerSource) -> None:
        self._ngrams, self._vocab_size = ngrams, source.spec.vocab_size
        parallel, size = source.shard.tensor_parallel, source.spec.hidden_size
        width = size // ngrams.num_tables
        self._tables, self._projections = [], []
        for index in range(ngrams.num_tables):
            rows, name = ngrams.num_rows(index), f"embed_ngrams.{index}.weight"
            table = source.weights.read_table(name, rows, width, parallel.part(rows))
            self._tables.append(VocabParallelEmbedding(table, rows, parallel))
            self._projections.append(
                source.read_linear(f"embed_ngram_projections.{index}", size, width)
            )

    def average(self, x_TD: Tensor, ids_T: Tensor, earlier_TW: Tensor) -> Tensor:
        """Return the mean of the embeddings `x_TD` of tokens and those of the n-grams that end with them.

        Args:
            x_TD: The embeddings of the tokens.
            ids_T: The tokens.
            earlier_TW: The tokens before each, the last one first; negative where there is none.
        """
        rows_TH = self._rows(ids_T.long(), earlier_TW.long())
        for rows_T, table, project in zip(
            rows_TH.unbind(1), self._tables, self._projections, strict=True
        ):
            x_TD = x_TD + project(table(rows_T))
        return x_TD / (len(self._tables) + 1)

    def _rows(self, ids_T: Tensor, earlier_TW: Tensor) -> Tensor:
        ngrams = self._ngrams
        is_outside_TW = (earlier_TW < 0) | (earlier_TW == ngrams.end_id)
        earlier_TW = earlier_TW.masked_fill(is_outside_TW.cumsum(1) > 0, 0)
        rows = []
        for index in range(ngrams.num_tables):
            count = ngrams.num_rows(index)
            row_T, factor = ids_T % count, 1
            for distance in range(index // ngrams.num_heads + 1):
                factor = factor * self._vocab_size % count
                row_T = (row_T + earlier_TW[:, distance] * factor) % count
            rows.append(row_T)
        return torch.stack(rows, 1)
