"""The attention block of a decoder layer.

Shapes: T tokens of a step, D hidden size, H query heads and G key/value heads of this shard, K head dimension, Q rows
of heads in a group (its queries, key and value), R rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from ..attention import AttentionBackend, AttentionLayer
from ..layers.layer_spec import LayerSpec
from ..layers.layers import HeadBound, HeadLayerNorm, HeadNorm, KeyNorm
from ..layers.parallel.shard import ModelShard
from ..layers.parallel.tensor_parallel import elements
from ..layers.rope import QueryScaling, RotaryTables, apply_rotary
from ..layers.spec import ModelSpec
from ..layers.specs.latent import RopeOrder
from .attention_kinds.full_norm import FullNorm
from .indexers.blocks import read_block_indexer
from .layer_source import LayerSource
from .mlp import DividedNorm
from .positions.disentangled import read_distance_scores
from .positions.distance_biases import biases_by_distance, head_blocks, read_slopes
from .positions.relative_biases import RelativeBiases
from .projections import (
    LowRankQueries,
    SeparateProjections,
    read_sink_keys,
    read_sinks,
    sink_rows,
    tap_rows,
)
from .weights import Rows, WeightReader


class Attention:
    """The fused projection to queries, keys and values, then norms, rotation, attention and the output projection."""

    def __init__(self, layer: LayerSpec, source: LayerSource, backend: AttentionBackend) -> None:
        spec, weights, prefix, shard, _ = source
        self._backend = backend.for_layer(spec, shard)
        self._head_dim, self._output_dim = spec.head_dim, spec.output_dim
        self._query_scaling = layer.query_scaling
        self._rotates_before_norm = spec.rotates_before_norm
        self._rotates_heads = layer.rope is not None and layer.rope.fourier is not None
        self._is_gated = spec.gates_attention
        self._clip = spec.qkv_clip
        self._norms_heads, self._norm_eps = spec.norms_heads, spec.norm_eps
        self._gate = torch.sigmoid if spec.output_gate == "sigmoid" else F.softplus
        heads, kv_heads = shard.heads(spec), shard.kv_heads(spec)
        kv_scales = None
        if backend.dtype == torch.float8_e4m3fn:
            stored = prefix if layer.kv_source is None else f"layers.{layer.kv_source}.self_attn."
            kv_scales = weights.read_kv_scales(stored, spec.num_kv_heads, kv_heads)
        self._layer = AttentionLayer(
            spec.attention_scale,
            layer.window,
            spec.attention_softcap,
            kv_scales,
            alibi_slopes_H=read_slopes(spec, heads, weights.device),
            sinks_H=read_sinks(spec, layer, weights, prefix, heads),
            distance_biases_HE=biases_by_distance(spec, weights, prefix, heads),
            is_sparse=spec.block_indexer is not None and layer.chooses_keys,
            head_blocks=head_blocks(layer, heads, weights.device),
            distance_scores=read_distance_scores(
                source, qkv_rows(spec, layer, weights, prefix, shard)
            ),
        )
        self._stores = layer.kv_source is None
        self._has_value_projection = layer.has_value_projection
        self._num_heads = len(heads)
        self._num_kv_heads = len(kv_heads) if self._stores else 0
        rows = qkv_rows(spec, layer, weights, prefix, shard)
        self._biases: RelativeBiases | None = None
        if spec.relative_biases is not None:
            self._biases = RelativeBiases(spec, spec.relative_biases, layer, weights, prefix, heads)
            rows.append(self._biases.rows)
        of_sinks, of_taps = sink_rows(spec, prefix, heads), tap_rows(spec, layer, prefix, shard)
        rows += of_sinks + of_taps
        self._extra_sizes = [sum(each.count for each in part) for part in (of_sinks, of_taps)]
        self._indexer = read_block_indexer(spec, layer, weights, prefix, kv_heads)
        rows += [] if self._indexer is None else self._indexer.rows
        columns = layer.input_size or spec.hidden_size
        self.qkv: Any
        if layer.input_norms:
            self.qkv = SeparateProjections(rows, columns, source)
        elif spec.query_rank:
            self.qkv = LowRankQueries(rows, source)
        else:
            has_biases = spec.qkv_bias or spec.has_gate_biases
            self.qkv = source.read_rows(rows, columns, has_biases=has_biases, is_adapted=True)
        output_size = spec.num_heads * spec.output_dim
        outputs = elements(heads, spec.output_dim)
        self._output = source.read_columns(
            "o_proj",
            spec.hidden_size,
            output_size,
            outputs,
            has_bias=spec.attention_output_bias,
            is_adapted=True,
        )
        self._output_norm: DividedNorm | None = None
        if spec.has_inner_norms:
            self._output_norm = DividedNorm.read(source, "attn_sub_norm", output_size, outputs)
        self._head_norm: HeadNorm | None = None
        self._full_norm: FullNorm | None = None
        if spec.qk_norm == "full":
            self._full_norm = FullNorm(spec, weights, prefix, shard)
        elif spec.qk_norm is not None and not (spec.qk_norm == "unit" and layer.rope is None):
            self._head_norm = head_norm(spec, layer, weights, prefix, shard)
        self._sink_keys = read_sink_keys(spec, weights, prefix, kv_heads, _rope_order(spec, layer))
        self._value_norm: HeadNorm | None = None
        if spec.has_value_norm:
            ones_GK = torch.ones(len(kv_heads), spec.head_dim, device=weights.device)
            self._value_norm = HeadNorm(ones_GK, spec.norm_eps)
        # The backend's kernels can fuse only an RMS norm with the rotation. Queries are scaled after their norm.
        self._has_separate_norm = self._head_norm is not None and (
            spec.rotates_before_norm
            or isinstance(self._head_norm, HeadBound | HeadLayerNorm | KeyNorm)
            or layer.query_scaling is not None
        )

    def forward(
        self,
        x: Any,
        positions_T: Tensor,
        tables: RotaryTables | None,
        kv_cache: Tensor,
        attn_metadata: Any,
        convolve: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the attention output [T, D] of a layer.

        `convolve` is applied to the queries, keys and values [T, HK + 2GK] of the step's tokens, and to their taps.
        """
        num_heads, num_kv_heads = self._num_heads, self._num_kv_heads
        qkv_TF = self.qkv(x)
        index, layer = None, self._layer
        num_main = qkv_TF.shape[1] - sum(self._extra_sizes)
        qkv_TF, sinks_TH, taps_TX = qkv_TF.split((num_main, *self._extra_sizes), 1)
        if self._extra_sizes[0]:
            layer = replace(layer, sinks_TH=sinks_TH.float())
        if self._biases is not None:
            qkv_TF, projected_TX = qkv_TF.tensor_split((qkv_TF.shape[1] - self._biases.size,), 1)
            biases_THE = self._biases.of_queries(projected_TX)
            if self._query_scaling is not None:
                biases_THE = scale_queries(biases_THE, positions_T, self._query_scaling)
            layer = replace(layer, query_biases_THE=biases_THE)
        if convolve is not None:
            qkv_TF = convolve(qkv_TF, taps_TX)
        if self._indexer is not None:
            qkv_TF, index_TF = qkv_TF.tensor_split((qkv_TF.shape[1] - self._indexer.size,), 1)
            index = self._indexer.queries(index_TF, positions_T, tables)
        qkv_THK = qkv_TF.unflatten(-1, (-1, self._head_dim))
        num_values = num_kv_heads if self._has_value_projection else 0
        sizes = [num_heads + num_kv_heads, num_values, *[num_heads] * self._is_gated]
        qk_THK, v_TGK, *gate_THK = qkv_THK.split(sizes, 1)
        if not self._has_value_projection:
            v_TGK = qk_THK[:, num_heads:]
        if self._value_norm is not None and self._stores:
            v_TGK = self._value_norm(v_TGK)
        if self._full_norm is not None:
            qk_THK = self._full_norm(qk_THK)
        if self._clip is not None:
            qk_THK = qk_THK.clamp(-self._clip, self._clip)
            v_TGK = v_TGK.clamp(-self._clip, self._clip)
        head_norm = self._head_norm
        if head_norm is not None and self._has_separate_norm:
            if self._rotates_before_norm and tables is not None:
                qk_THK, tables = apply_rotary(qk_THK, tables), None
            qk_THK, head_norm = head_norm(qk_THK), None
        if self._query_scaling is not None:
            qk_THK = self._scaled(qk_THK, positions_T, self._query_scaling)
        sinks = None
        if self._sink_keys is not None or self._rotates_heads or not self._stores:
            # The kernels that store keys rotate all heads by the same angles, and return no rotated queries for sinks.
            qk_THK = qk_THK if head_norm is None else head_norm(qk_THK)
            qk_THK = qk_THK if tables is None else apply_rotary(qk_THK, tables)
            head_norm = tables = None
        if self._sink_keys is not None:
            sinks = self._sink_keys.of_queries(qk_THK[:, :num_heads])
            v_TGK, layer = sinks.marked(v_TGK), replace(layer, sinks_TH=sinks.scores_TH)
        if self._stores:
            attended_THK = self._backend.forward_projected(
                qk_THK, v_TGK, head_norm, tables, kv_cache, attn_metadata, layer, index
            )
        else:
            attended_THK = self._backend.attend(qk_THK, kv_cache, attn_metadata, layer)
        if sinks is not None:
            attended_THK = sinks.complete(attended_THK)
        if self._norms_heads:
            shape = (self._output_dim,)
            normed_THK = torch.rms_norm(attended_THK.float(), shape, None, self._norm_eps)
            attended_THK = normed_THK.to(attended_THK.dtype)
        if gate_THK:
            attended_THK = attended_THK * self._gate(gate_THK[0])
        attended_TD = attended_THK[..., : self._output_dim].flatten(1)
        if self._output_norm is not None:
            attended_TD = self._output_norm(attended_TD)
        return self._output(attended_TD)

    def store_keys(
        self, x: Any, tables: RotaryTables | None, kv_cache: Tensor, attn_metadata: Any
    ) -> None:
        """Store the keys and values of `x`, in a layer without convolutions and indexers."""
        num_values = self._num_kv_heads if self._has_value_projection else 0
        sizes = self._num_heads + self._num_kv_heads, num_values
        # Gates follow the values.
        qkv_THK = self.qkv(x).unflatten(-1, (-1, self._head_dim))[:, : sum(sizes)]
        qk_THK, v_TGK = qkv_THK.split(sizes, 1)
        if not self._has_value_projection:
            v_TGK = qk_THK[:, self._num_heads :]
        if self._value_norm is not None:
            v_TGK = self._value_norm(v_TGK)
        if self._head_norm is not None:
            qk_THK = self._head_norm(qk_THK)
        if tables is not None:
            qk_THK = apply_rotary(qk_THK, tables)
        k_TGK = qk_THK[:, self._num_heads :]
        self._backend.store(k_TGK, v_TGK, kv_cache, attn_metadata, self._layer)

    def _scaled(self, qk_THK: Tensor, positions_T: Tensor, scaling: QueryScaling) -> Tensor:
        """Return the queries and keys, with the queries scaled by a factor that depends on their positions."""
        q_THK, k_TGK = qk_THK.split((self._num_heads, self._num_kv_heads), 1)
        return torch.cat((scale_queries(q_THK, positions_T, scaling), k_TGK), 1)


def scale_queries(q_THK: Tensor, positions_T: Tensor, scaling: QueryScaling) -> Tensor:
    """Return queries multiplied by a factor that depends on their positions."""
    steps_T = (positions_T + scaling.offset) / scaling.length
    match scaling.kind:
        case "power":
            factor_T = (scaling.beta * steps_T.log1p()).exp()
        case "log":
            factor_T = 1 + scaling.beta * steps_T.clamp(min=1).log()
        case "steps":
            factor_T = 1 + scaling.beta * steps_T.floor().log1p()
    return (q_THK * factor_T.view(-1, 1, 1)).to(q_THK.dtype)


def qkv_rows(
    spec: ModelSpec, layer: LayerSpec, weights: WeightReader, prefix: str, shard: ModelShard
) -> list[Rows]:
    """Return this rank's rows of the projection to queries, keys, values and gates, in this order."""
    heads, kv_heads = shard.heads(spec), shard.kv_heads(spec)
    if spec.has_grouped_qkv:
        order_K = _rope_order(spec, layer)
        group = spec.num_heads // spec.num_kv_heads
        size = (group + 2) * spec.head_dim
        rows_GQK = torch.arange(len(kv_heads) * size).view(len(kv_heads), group + 2, -1)
        queries = rows_GQK[:, :group, order_K].flatten(0, 1)
        first = heads.start - kv_heads.start * group
        orders = (
            queries[first : first + len(heads)].flatten(),
            rows_GQK[:, group, order_K].flatten(),
            rows_GQK[:, group + 1].flatten(),
        )
        part = elements(kv_heads, size)
        if not spec.key_bias:
            # The biases of queries and of values are tensors of their own.
            matrix = Rows(f"{prefix}qkv_proj", spec.num_kv_heads * size, part, has_bias=False)
            query_rows, key_rows, value_rows = (replace(matrix, order=order) for order in orders)
            return [
                _with_own_bias(query_rows, f"{prefix}q_bias", spec.num_heads, heads, spec),
                key_rows,
                _with_own_bias(value_rows, f"{prefix}v_bias", spec.num_kv_heads, kv_heads, spec),
            ]
        order = torch.cat(orders)
        return [Rows(f"{prefix}qkv_proj", spec.num_kv_heads * size, part, order)]
    query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if spec.num_qkv_blocks:
        value_size = spec.num_kv_heads * spec.output_dim
        total = query_size + kv_size + value_size
        sizes_by_kind = {"q": query_size, "k": kv_size, "v": value_size}
        blocks = torch.arange(total).view(spec.num_qkv_blocks, -1)
        widths = [sizes_by_kind[x] // spec.num_qkv_blocks for x in spec.qkv_block_order]
        by_kind = dict(zip(spec.qkv_block_order, blocks.split(widths, 1), strict=True))
        order_K = _rope_order(spec, layer)
        queries, keys = (by_kind[x].reshape(-1, spec.head_dim)[:, order_K] for x in "qk")
        # Values are padded to the size of the keys.
        padded_K = torch.arange(spec.head_dim) % spec.output_dim
        values = by_kind["v"].reshape(-1, spec.output_dim)[:, padded_K]
        own, own_kv = slice(heads.start, heads.stop), slice(kv_heads.start, kv_heads.stop)
        order = torch.cat([x.flatten() for x in (queries[own], keys[own_kv], values[own_kv])])
        first, last = int(order.min()), int(order.max())
        return [Rows(f"{prefix}qkv_proj", total, range(first, last + 1), order - first)]
    queries_part, keys_part = elements(heads, spec.head_dim), elements(kv_heads, spec.head_dim)
    if spec.gates_attention and not spec.has_gate_projection:
        part = range(2 * queries_part.start, 2 * queries_part.stop)
        queries, gates = torch.arange(len(part)).view(-1, 2, spec.head_dim).unbind(1)
        return [
            Rows(f"{prefix}q_proj", 2 * query_size, part, queries.flatten()),
            *(Rows(f"{prefix}{name}", kv_size, keys_part) for name in ("k_proj", "v_proj")),
            Rows(f"{prefix}q_proj", 2 * query_size, part, gates.flatten()),
        ]
    if spec.has_gate_projection and weights.has(f"{prefix}gqkv_proj.weight"):
        sizes = [query_size, query_size, kv_size, kv_size]
        parts_of_rank = [queries_part, queries_part, keys_part, keys_part]
        starts = accumulate(sizes, initial=0)
        gate_rows, *others = (
            Rows(f"{prefix}gqkv_proj", sum(sizes), range(start + each.start, start + each.stop))
            for start, each in zip(starts, parts_of_rank, strict=False)
        )
        return [*others, gate_rows]
    if spec.has_grouped_kv:
        part = elements(kv_heads, 2 * spec.head_dim)
        keys, values = torch.arange(len(part)).view(-1, 2, spec.head_dim).unbind(1)
        return [
            Rows(f"{prefix}q_proj", query_size, queries_part),
            *(Rows(f"{prefix}kv_proj", 2 * kv_size, part, x.flatten()) for x in (keys, values)),
        ]
    values_part = elements(kv_heads, spec.output_dim)
    rows = weights.rows(
        prefix,
        ["q_proj", "k_proj", "v_proj"],
        [query_size, kv_size, spec.num_kv_heads * spec.output_dim],
        [queries_part, keys_part, values_part],
    )
    if spec.value_dim is not None:
        # Pad the values with zero rows to the size of the keys.
        values = torch.arange(len(values_part)).view(-1, spec.value_dim)
        filled = values[:, torch.arange(spec.head_dim) % spec.value_dim]
        rows[2] = replace(rows[2], order=filled.flatten())
    if spec.has_gate_projection:
        queries_to_values = [replace(each, has_bias=spec.qkv_bias) for each in rows]
        return [*queries_to_values, _gate_rows(spec, prefix, heads)]
    if not spec.key_bias:
        rows[1] = replace(rows[1], has_bias=False)
    if layer.kv_source is not None:
        return rows[:1]
    if not layer.has_value_projection:
        return rows[:2]
    if weights.has(f"{prefix}v_proj_delayed.weight"):
        rows[2:] = _halves(rows[2], f"{prefix}v_proj_delayed")
    if spec.rope_order == "half":
        return rows
    order_K = _rope_order(spec, layer)
    query_rows, key_rows, *rows_of_values = rows
    return [
        *(
            replace(
                each,
                order=torch.arange(len(each.part)).view(-1, spec.head_dim)[:, order_K].flatten(),
            )
            for each in (query_rows, key_rows)
        ),
        *rows_of_values,
    ]


def _halves(rows: Rows, second: str) -> list[Rows]:
    """Return rows of a matrix whose second half is the module `second`."""
    half, part = rows.total // 2, rows.part
    parts = {
        rows.name: range(part.start, min(part.stop, half)),
        second: range(max(part.start - half, 0), part.stop - half),
    }
    return [Rows(name, half, own) for name, own in parts.items() if own]


def _with_own_bias(rows: Rows, name: str, count: int, heads: range, spec: ModelSpec) -> Rows:
    own = Rows(name, count * spec.head_dim, elements(heads, spec.head_dim))
    return replace(rows, has_bias=True, own_bias=own)


def _gate_rows(spec: ModelSpec, prefix: str, heads: range) -> Rows:
    """Return the rows of the gate projection. A gate for a whole head is repeated for each of its elements."""
    name = f"{prefix}gate_proj"
    if not spec.has_head_gates:
        return Rows(
            name,
            spec.num_heads * spec.head_dim,
            elements(heads, spec.head_dim),
            has_bias=spec.has_gate_biases,
            rows_per_bias=spec.head_dim,
        )
    order = torch.arange(len(heads)).repeat_interleave(spec.head_dim)
    return Rows(name, spec.num_heads, heads, order, has_bias=spec.has_gate_biases)


def _rope_order(spec: ModelSpec, layer: LayerSpec) -> Tensor:
    """For each row of a head, in the order that rotation needs, return its index in the checkpoint."""
    if layer.rope is None:
        return torch.arange(spec.head_dim)
    rotary_dim = layer.rope.rotary_dim
    return torch.cat(
        (rotary_order(spec.rope_order, rotary_dim), torch.arange(rotary_dim, spec.head_dim))
    )


def rotary_order(order: RopeOrder, rotary_dim: int) -> Tensor:
    """For each rotated row of a head, in the order that rotation needs, return its index in the checkpoint."""
    rows_R = torch.arange(rotary_dim)
    if order == "interleaved":
        return rows_R.view(rotary_dim // 2, 2).T.flatten()
    return rows_R.roll(rotary_dim // 2) if order == "swapped" else rows_R


def head_norm(
    spec: ModelSpec, layer: LayerSpec, weights: WeightReader, prefix: str, shard: ModelShard
) -> HeadNorm:
    """Return a norm over each query head and each key head."""
    if spec.qk_norm == "bounded":
        own, size = shard.heads(spec), spec.head_dim
        weight_X = weights.read_elements(f"{prefix}q_norm.weight", spec.num_heads * size)
        weight_HK = weight_X.view(-1, size)[own.start : own.stop]
        of_keys_GK = torch.ones(len(shard.kv_heads(spec)), size, device=weights.device)
        return HeadBound(torch.cat((weight_HK, of_keys_GK)), spec.head_bound)
    order_K = _rope_order(spec, layer).to(weights.device)
    if spec.qk_norm == "only keys":
        weight_K = weights.read_vector(f"{prefix}k_norm.weight", spec.head_dim)[order_K]
        of_keys_GK = weight_K.expand(len(shard.kv_heads(spec)), -1)
        return KeyNorm(of_keys_GK, spec.norm_eps, len(shard.heads(spec)))

    def offset(name: str) -> float | None:
        has_weights = spec.qk_norm not in ("unit", "scaled")
        if spec.qk_norm == "keys":
            has_weights = name == "k_norm"
        return spec.norm_offset(name) if has_weights else None

    def read(kind: str) -> Tensor:
        parts = []
        norms = [("q_norm", spec.num_heads, shard.heads(spec))]
        if layer.kv_source is None:
            norms.append(("k_norm", spec.num_kv_heads, shard.kv_heads(spec)))
        for name, count, heads in norms:
            if offset(name) is None:
                part_HK = torch.ones(len(heads), spec.head_dim, device=weights.device)
                if spec.qk_norm == "scaled" and name == "k_norm":
                    scale_H = weights.read_elements(f"{prefix}key_scale", count)
                    part_HK *= scale_H[heads.start : heads.stop, None]
            elif spec.qk_norm == "each head":
                part_HK = _read_each_head(weights, f"{prefix}{name}.", kind, count, heads, spec)
            else:
                one_K = weights.read_vector(f"{prefix}{name}.{kind}", spec.head_dim)
                part_HK = one_K.expand(len(heads), -1)
            parts.append(part_HK[:, order_K])
        return torch.cat(parts)

    weight_HK = read("weight") + (offset("k_norm") or 0.0)
    if spec.norm_kind == "rms" and not spec.qk_norm_bias:
        return HeadNorm(weight_HK, head_norm_eps(spec))
    return HeadLayerNorm(weight_HK, spec.norm_eps, read("bias") if spec.qk_norm_bias else None)


def head_norm_eps(spec: ModelSpec) -> float:
    """Return the epsilon that is added to a head's mean square. "Scaled" norms only avoid a division by 0.

    In an nGPT, a head's sum of squares gets the same addition as the hidden state's, so its mean gets a larger one.
    """
    if spec.qk_norm == "scaled":
        return 1e-12
    return spec.norm_eps * (spec.hidden_size / spec.head_dim if spec.interpolates_blocks else 1)


def _read_each_head(
    weights: WeightReader, prefix: str, kind: str, count: int, heads: range, spec: ModelSpec
) -> Tensor:
    """Return the weights of these heads' norms [H, K], which are stored as one tensor or as one per head."""
    if not weights.has(f"{prefix}0.{kind}"):
        stored = weights.read_elements(f"{prefix}{kind}", count * spec.head_dim)
        return stored.view(count, -1)[heads.start : heads.stop]
    all_HK = torch.stack(
        [weights.read_vector(f"{prefix}{i}.{kind}", spec.head_dim) for i in range(count)]
    )
    return all_HK[heads.start : heads.stop]
