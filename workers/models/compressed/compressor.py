"""The computation of entries from the inputs of their tokens.

Shapes: T tokens of a step, N entries, W tokens that an entry summarizes, r its rate, D hidden size, E elements of an
entry, F elements of a token's inputs, I of an index key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layers.layers import RMSNorm
from ...layers.specs.compressed import CompressedSpec, Compression
from ..layer_source import LayerSource
from ..weights import Rows, WeightReader


class DerivedIndexKeys:
    """Computes index keys from entries."""

    def __init__(self, compressed: CompressedSpec, source: LayerSource) -> None:
        spec, size = source.spec, compressed.indexer.head_dim
        self._project = source.read_linear("k_proj", size, spec.head_dim)
        weight_I = source.weights.read_vector(f"{source.prefix}k_norm.weight", size)
        self._norm = RMSNorm(weight_I, spec.norm_eps)
        self._dtype = source.weights.dtype

    def __call__(self, entries_NE: Tensor) -> Tensor:
        """Return the index keys before their rotation, float32 [N, I]."""
        return self._norm(self._project(entries_NE.to(self._dtype)).float())


def input_rows(compression: Compression, entry_dim: int, prefix: str) -> list[Rows]:
    """Return the matrices whose products with a hidden state are a token's inputs: its values, then its logits."""
    names = ["kv_proj", *["gate_proj"] * compression.has_logits]
    count = compression.num_inputs(entry_dim) // len(names)
    return [Rows(f"{prefix}{name}", count, range(count)) for name in names]


def read_biases(
    compression: Compression, entry_dim: int, weights: WeightReader, prefix: str
) -> Tensor:
    """Return what is added to the logits of each of an entry's tokens, float32 [W, E]."""
    if compression.derives_index_keys:
        return torch.zeros(compression.span, entry_dim, device=weights.device)
    half = compression.num_inputs(entry_dim) // 2
    biases_rF = weights.read_float32(f"{prefix}position_bias", compression.rate, half)
    return torch.cat(biases_rF.split(entry_dim, -1))


class Compressor:
    """Computes entries of `entry_dim` elements.

    A token has a value and a logit for each element, twice if entries overlap: first for the next entry, then for its
    own. The product of hidden states with the matrices `rows` are a token's inputs, of which there are `size`.
    """

    def __init__(
        self,
        compression: Compression,
        entry_dim: int,
        norm_eps: float,
        weights: WeightReader,
        prefix: str,
    ) -> None:
        self._compression = compression
        self._entry_dim = entry_dim
        self.size = compression.num_inputs(entry_dim)
        self.rows = input_rows(compression, entry_dim, prefix)
        self._biases_WE = read_biases(compression, entry_dim, weights, prefix)
        self._norm = RMSNorm(weights.read_vector(f"{prefix}kv_norm.weight", entry_dim), norm_eps)

    def entries(self, inputs_NWF: Tensor, is_first_N: Tensor) -> Tensor:
        """Return entries before their rotation, float32 [N, E].

        Args:
            inputs_NWF: The inputs of the tokens of each entry.
            is_first_N: Which entries are the first of their sequence: if entries overlap, they have no tokens before.
        """
        if not self._compression.has_logits:
            return self._norm(inputs_NWF.float().squeeze(1))
        values_NWF, logits_NWF = inputs_NWF.float().chunk(2, -1)
        values_NWE, logits_NWE = self._own_parts(values_NWF), self._own_parts(logits_NWF)
        logits_NWE = logits_NWE + self._biases_WE
        if self._compression.overlaps:
            before_NrE = logits_NWE[:, : self._compression.rate]
            before_NrE.masked_fill_(is_first_N[:, None, None], -torch.inf)
        return self._norm((values_NWE * logits_NWE.softmax(1)).sum(1))

    def _own_parts(self, x_NWF: Tensor) -> Tensor:
        """Return what each token contributes to the entry [N, W, E], not to the next one or the one before."""
        if not self._compression.overlaps:
            return x_NWF
        before, own = x_NWF.split(self._compression.rate, 1)
        return torch.cat((before[..., : self._entry_dim], own[..., self._entry_dim :]), 1)
