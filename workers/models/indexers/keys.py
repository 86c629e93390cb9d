"""The indexer of sparse latent attention; see `IndexerSpec`. Every rank has the whole indexer.

Shapes: T tokens of a step, J heads of the indexer, I elements of an index key, R rotated ones, P keys of a group, N
sequences, B groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...attention import IndexQueries
from ...layers.layers import LayerNorm
from ...layers.rope import RotaryTables, apply_rotary
from ...layers.specs.latent import IndexerSpec, LatentSpec
from ..attention import rotary_order
from ..latent.log_scales import LogScales
from ..weights import Rows, WeightReader
from .blocks import weighted_means


class Indexer:
    """Computes the index keys of a layer, and the index queries with which its tokens choose keys."""

    def __init__(
        self,
        latent: LatentSpec,
        indexer: IndexerSpec,
        hidden_size: int,
        weights: WeightReader,
        prefix: str,
    ) -> None:
        self._indexer = indexer
        self.first_rows = index_rows(latent, indexer, prefix)
        self.sizes = [len(rows.part) for rows in self.first_rows]
        self.query_rows = index_query_rows(latent, indexer, prefix)
        order = index_order(latent, indexer).to(weights.device)
        weight_I, bias_I = (
            weights.read_vector(f"{prefix}indexer.k_norm.{each}", indexer.head_dim)[order]
            for each in ("weight", "bias")
        )
        self._norm = LayerNorm(weight_I, indexer.norm_eps, bias_I)
        self.input_norm: LayerNorm | None = None
        if indexer.norms_inputs:
            weight_D, bias_D = (
                weights.read_vector(f"{prefix}indexer.q_input_norm.{each}", hidden_size)
                for each in ("weight", "bias")
            )
            self.input_norm = LayerNorm(weight_D, indexer.norm_eps, bias_D)
        self._scales: LogScales | None = None
        if indexer.has_log_scales:
            heads = range(indexer.num_heads)
            self._scales = LogScales(weights, f"{prefix}indexer.", indexer.num_heads, heads)
        self._biases_PI: Tensor | None = None
        if indexer.has_groups:
            self._biases_PI = weights.read_float32(
                f"{prefix}indexer.position_bias", indexer.group_size, indexer.head_dim
            )[:, order]

    def queries(
        self,
        projected: Sequence[Tensor],
        q_TF: Tensor,
        positions_T: Tensor,
        tables: RotaryTables | None,
    ) -> IndexQueries:
        """Return the index keys and queries.

        Args:
            projected: The products of hidden states with `first_rows`.
            q_TF: The index queries before rotation.
            positions_T: The positions of the step's tokens.
            tables: The rotary tables of the step.
        """
        indexer = self._indexer
        k_TI, weights_TJ, *logits = projected
        k_T1I = self._norm(k_TI).unsqueeze(1)
        q_TJI = q_TF.unflatten(-1, (indexer.num_heads, indexer.head_dim))
        if self._scales is not None:
            q_TJI = self._scales.scale(q_TJI, positions_T)
        if tables is not None:
            k_T1I, q_TJI = apply_rotary(k_T1I, tables), apply_rotary(q_TJI, tables)
        k_T1I = torch.cat((k_T1I, *(each.unsqueeze(1) for each in logits)), -1)
        weights_TJ = weights_TJ * (indexer.head_dim * indexer.num_heads) ** -0.5
        return IndexQueries(
            k_T1I,
            q_TJI.unsqueeze(1),
            weights_TJ.unsqueeze(1),
            indexer.num_chosen,
            indexer.group_size,
            summarize=self._keys_of_groups if indexer.has_groups else None,
        )

    def _keys_of_groups(self, keys_NBPI: Tensor) -> Tensor:
        """Return the index key of each group [N, B, I], given the index keys and logits of its tokens."""
        assert self._biases_PI is not None
        return weighted_means(keys_NBPI, self._biases_PI)


def index_rows(latent: LatentSpec, indexer: IndexerSpec, prefix: str) -> list[Rows]:
    """Return the rows of the projections of hidden states: to index keys, weights of heads, and logits of groups."""
    size, count = indexer.head_dim, indexer.num_heads
    order = index_order(latent, indexer)
    rows = [
        Rows(f"{prefix}indexer.wk", size, range(size), order, has_bias=False),
        Rows(f"{prefix}indexer.weights_proj", count, range(count), has_bias=False),
    ]
    if indexer.has_groups:
        rows.append(Rows(f"{prefix}indexer.gate_proj", size, range(size), order, has_bias=False))
    return rows


def index_query_rows(latent: LatentSpec, indexer: IndexerSpec, prefix: str) -> Rows:
    """Return the rows of the projection from the queries' latent vector to index queries."""
    size = indexer.num_heads * indexer.head_dim
    rows_JI = torch.arange(size).view(indexer.num_heads, -1)[:, index_order(latent, indexer)]
    return Rows(f"{prefix}indexer.wq_b", size, range(size), rows_JI.flatten(), has_bias=False)


def index_order(latent: LatentSpec, indexer: IndexerSpec) -> Tensor:
    """For each element of an index key, in the order that rotation needs, return its index in the checkpoint."""
    order_R = rotary_order(indexer.rope_order, latent.rotary_dim)
    num_plain = indexer.head_dim - latent.rotary_dim
    if indexer.rotates_last:
        return torch.cat((num_plain + order_R, torch.arange(num_plain)))
    return torch.cat((order_R, latent.rotary_dim + torch.arange(num_plain)))
