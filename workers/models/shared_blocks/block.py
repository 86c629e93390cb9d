"""A transformer block whose weights several layers share; see `SharedBlock`.

Shapes: T tokens of a step, D hidden size, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from ...attention import AttentionBackend
from ...layers.layer_spec import LayerSpec
from ...layers.layers import LayerKernels, Linear
from ...layers.parallel.shard import ModelShard
from ...layers.rope import RotaryTables
from ...layers.shared_block import SharedBlock
from ...layers.spec import ModelSpec
from ..attention import Attention, qkv_rows
from ..layer_source import LayerSource
from ..mlp import MLP
from ..weights import Rows, WeightReader

_ADAPTED = ("mlp.gate_up_proj", *(f"self_attn.{name}_proj" for name in "qkv"))


class Block:
    """Attention, then an MLP, each after a norm. There is no residual stream between them.

    The layer `source` stores the weights, and the low-rank products of all layers.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: int,
        weights: WeightReader,
        backend: AttentionBackend,
        shard: ModelShard,
        kernels: LayerKernels,
    ) -> None:
        self._prefix = prefix = f"layers.{source}.shared_block."
        # The attention reads hidden states and embeddings.
        layer = replace(spec.layers[source], input_size=2 * spec.hidden_size)
        self._attention_norm, self._mlp_norm = (
            kernels.norm(weights.read_vector(f"{prefix}{name}.weight", size), spec.norm_eps)
            for name, size in (
                ("input_layernorm", layer.input_size),
                ("pre_ff_layernorm", spec.hidden_size),
            )
        )
        parts = LayerSource(spec, weights, prefix, shard, kernels)
        self.attention = Attention(layer, parts.at("self_attn."), backend)
        self.mlp = MLP(parts.at("mlp."), spec.intermediate_size)
        skip_other_stages(spec, weights, prefix, shard)

    def forward(
        self,
        x_TE: Tensor,
        positions_T: Tensor,
        tables: RotaryTables | None,
        kv_cache: Tensor,
        attn_metadata: Any,
    ) -> Tensor:
        """Return the MLP's output [T, D], given hidden states and embeddings [T, 2 * D]."""
        normed_TE = self._attention_norm(x_TE)
        attended_TD = self.attention.forward(
            normed_TE, positions_T, tables, kv_cache, attn_metadata
        )
        return self.mlp.forward(self._mlp_norm(attended_TD))

    def adapted(
        self,
        spec: ModelSpec,
        layer: LayerSpec,
        weights: WeightReader,
        shard: ModelShard,
        kernels: LayerKernels,
    ) -> Block:
        """Return a block with the same weights and the low-rank products of a layer that uses it."""
        use, prefix = layer.shared_block, self._prefix
        assert use is not None
        if not use.rank:
            return self

        def adapt(linear: Linear, rows: Sequence[Rows], columns: int) -> Linear:
            down, up = map(kernels.linear, read_low_rank(weights, use, rows, columns))
            return lambda x: linear(x).add_(up(down(x)))

        block, mlp = copy(self), copy(self.mlp)
        size = spec.intermediate_size
        part = shard.tensor_parallel.part(size)
        names = ["gate_proj", "up_proj"]
        rows = weights.rows(f"{prefix}mlp.", names, [size] * 2, [part] * 2)
        mlp.gate_up = adapt(mlp.gate_up, rows, spec.hidden_size)
        block.mlp = mlp
        if use.adapts_attention:
            attention = copy(self.attention)
            rows = qkv_rows(spec, layer, weights, f"{prefix}self_attn.", shard)
            attention.qkv = adapt(attention.qkv, rows, 2 * spec.hidden_size)
            block.attention = attention
        return block


def read_low_rank(
    weights: WeightReader, use: SharedBlock, rows: Sequence[Rows], columns: int
) -> tuple[Tensor, Tensor]:
    """Return both factors of a layer's own addition to a product with these rows and columns."""
    downs, ups = [], []
    for name in dict.fromkeys(row.name for row in rows):
        parts = [row for row in rows if row.name == name]
        factors = f"{name}_adapters.{use.number}"
        downs.append(weights.read(f"{factors}.0.weight", use.rank, columns))
        up_OR = weights.read(f"{factors}.1.weight", parts[0].total, use.rank)
        ups.append(torch.cat([row.select_from_all(up_OR) for row in parts]))
    return torch.cat(downs), torch.block_diag(*ups)


def skip_other_stages(
    spec: ModelSpec, weights: WeightReader, prefix: str, shard: ModelShard
) -> None:
    """Mark the low-rank products of other stages' layers, which are stored with a block, as not needed."""
    numbers = [
        layer.shared_block.number
        for i, layer in enumerate(spec.layers)
        if layer.shared_block is not None and i not in shard.layers
    ]
    weights.skip([f"{prefix}{name}_adapters.{number}." for name in _ADAPTED for number in numbers])
