"""The computation of entries from the inputs of their tokens.

Shapes: T tokens of a step, N entries, W tokens that an entry summarizes, r its rate, D hidden size, E elements of an
entry, F elements of a token's inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...layers.layers import RMSNorm
from ...layers.rope import RotaryTables
from ...layers.specs.compressed import Compression
from ..weights import Rows, WeightReader
from .rotation import rotate_last


def input_rows(compression: Compression, entry_dim: int, prefix: str) -> list[Rows]:
    """Return the matrices whose products with a hidden state are a token's inputs: its values, then its logits."""
    half = compression.num_inputs(entry_dim) // 2
    return [Rows(f"{prefix}{name}", half, range(half)) for name in ("kv_proj", "gate_proj")]


def read_biases(
    compression: Compression, entry_dim: int, weights: WeightReader, prefix: str
) -> Tensor:
    """Return what is added to the logits of each of an entry's tokens, float32 [W, E]."""
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
        self._half = self.size // 2
        self.rows = input_rows(compression, entry_dim, prefix)
        self._biases_WE = read_biases(compression, entry_dim, weights, prefix)
        self._norm = RMSNorm(weights.read_vector(f"{prefix}kv_norm.weight", entry_dim), norm_eps)

    def entries(self, inputs_NWF: Tensor, is_first_N: Tensor, tables: RotaryTables) -> Tensor:
        """Return entries [N, E].

        Args:
            inputs_NWF: The inputs of the tokens of each entry.
            is_first_N: Which entries are the first of their sequence: if entries overlap, they have no tokens before.
            tables: The rotary tables of the first of the last `rate` tokens of each entry.
        """
        values_NWF, logits_NWF = inputs_NWF.float().split(self._half, -1)
        values_NWE, logits_NWE = self._own_parts(values_NWF), self._own_parts(logits_NWF)
        logits_NWE = logits_NWE + self._biases_WE
        if self._compression.overlaps:
            before_NrE = logits_NWE[:, : self._compression.rate]
            before_NrE.masked_fill_(is_first_N[:, None, None], -torch.inf)
        entries_NE = self._norm((values_NWE * logits_NWE.softmax(1)).sum(1))
        return rotate_last(entries_NE.unsqueeze(1), tables).squeeze(1)

    def _own_parts(self, x_NWF: Tensor) -> Tensor:
        """Return what each token contributes to the entry [N, W, E], not to the next one or the one before."""
        if not self._compression.overlaps:
            return x_NWF
        before, own = x_NWF.split(self._compression.rate, 1)
        return torch.cat((before[..., : self._entry_dim], own[..., self._entry_dim :]), 1)
