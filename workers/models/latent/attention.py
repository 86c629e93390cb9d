"""Multi-head latent attention, computed directly on the latent vectors.

The matrix that expands latent vectors to a head's keys is applied to the head's queries instead. The matrix that
expands them to values is applied to the weighted sum of latent vectors. All heads therefore share a single key/value
head in the cache (DeepSeek-V2, arXiv 2405.04434).

Shapes: T tokens of a step, D hidden size, H heads of this shard, C latent vector, P plain and R rotated elements of a
head's query, V elements of its value, J heads of an indexer, I elements of an index key, K = C + R + I.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...attention import AttentionBackend, AttentionLayer
from ...layers.layer_spec import LayerSpec
from ...layers.layers import Linear, RMSNorm
from ...layers.parallel.tensor_parallel import elements
from ...layers.rope import RotaryTables, apply_rotary
from ...layers.spec import ModelSpec
from ...layers.specs.latent import LatentSpec
from ..attention import rotary_order, scale_queries
from ..indexers.keys import Indexer
from ..layer_source import LayerSource
from ..norms import read_latent_norm
from ..projections import read_sinks
from ..weights import Rows, WeightReader
from .log_scales import LogScales


class LatentAttention:
    """Multi-head latent attention, with the interface of `Attention`."""

    def __init__(
        self, latent: LatentSpec, layer: LayerSpec, source: LayerSource, backend: AttentionBackend
    ) -> None:
        spec, weights, prefix, shard, _ = source
        whole, latent = latent, latent.for_rope(layer.rope)
        self._latent = latent
        self._backend = backend.for_layer(spec, shard)
        self._num_missing = whole.rotary_dim - latent.rotary_dim
        heads = shard.heads(spec)
        self._layer = AttentionLayer(
            spec.attention_scale,
            layer.window,
            sinks_H=read_sinks(spec, layer, weights, prefix, heads),
            is_sparse=latent.indexer is not None,
        )
        self._query_scaling = layer.query_scaling
        self._num_heads = len(heads)
        self._query_norm: RMSNorm | None = None
        self._queries: Linear | None = None
        rows = first_rows(spec, latent, prefix, heads)
        self._has_keys = layer.kv_source is None
        if not self._has_keys:
            rows = rows[:1]
        gates = [gate_rows(spec, latent, prefix, heads)] if spec.gates_attention else []
        queries = [query_rows(spec, latent, prefix, heads)]
        self._indexer: Indexer | None = None
        self._index_queries: Linear | None = None
        if latent.indexer is not None and layer.chooses_keys:
            self._indexer = Indexer(whole, latent.indexer, spec.hidden_size, weights, prefix)
            rows += self._indexer.first_rows
            of_index = self._indexer.query_rows
            if latent.indexer.norms_inputs:
                self._index_queries = source.read_rows(
                    [of_index], spec.hidden_size, is_adapted=True
                )
            elif not latent.joins_query_vectors:
                queries.append(of_index)
            elif latent.query_rank is not None:
                self._index_queries = source.read_rows(
                    [of_index], latent.query_rank, is_adapted=True
                )
        if latent.joins_query_vectors:
            queries += gates
        else:
            rows += gates
        if latent.query_rank is not None:
            self._queries = source.read_rows(queries, latent.query_inputs, is_adapted=True)
            self._query_norm = read_latent_norm(
                source, "q_a_layernorm", latent.query_rank, latent.norm_eps
            )
        columns = layer.input_size or spec.hidden_size
        self.qkv = source.read_rows(rows, columns, has_biases=spec.qkv_bias, is_adapted=True)
        self._sizes = [len(rows[0].part)]
        if self._has_keys:
            self._sizes += [latent.kv_rank, latent.rotary_dim]
        if self._indexer is not None:
            self._sizes += self._indexer.sizes
        self._has_first_gates = bool(gates) and not latent.joins_query_vectors
        if self._has_first_gates:
            self._sizes.append(len(rows[-1].part))
        self._key_norm: RMSNorm | None = None
        if self._has_keys:
            self._key_norm = read_latent_norm(
                source, "kv_a_layernorm", latent.kv_rank, latent.norm_eps, latent.multiplier
            )
        self._rotated_norm: RMSNorm | None = None
        if self._has_keys and latent.norms_rotated_key:
            weight_R = weights.read_vector(f"{prefix}k_rotated_norm.weight", latent.rotary_dim)
            order_R = rotary_order(spec.rope_order, latent.rotary_dim).to(weights.device)
            self._rotated_norm = RMSNorm(weight_R[order_R], latent.norm_eps)
        self._scales: LogScales | None = None
        if latent.has_log_scales:
            self._scales = LogScales(weights, prefix, spec.num_heads, heads)
        self._source: LatentAttention | None = None
        self._keeps_keys = False
        self.kept_T1K: Tensor | None = None
        """The keys of the last step, if another layer copies them."""
        keys_HPC, values_HVC = read_expansions(spec, latent, weights, prefix, heads)
        self._keys_HPC = keys_HPC.contiguous()
        self._values_HCV = values_HVC.transpose(1, 2).contiguous()
        self._output = source.read_columns(
            "o_proj",
            spec.hidden_size,
            spec.num_heads * latent.value_dim,
            elements(heads, latent.value_dim),
            has_bias=spec.attention_output_bias,
            is_adapted=True,
        )

    def forward(
        self,
        x: Any,
        positions_T: Tensor,
        tables: RotaryTables | None,
        kv_cache: Tensor,
        attn_metadata: Any,
    ) -> Tensor:
        """Return the attention output [T, D] of a layer."""
        latent = self._latent
        q, *others = self.qkv(x).split(self._sizes, -1)
        stored, others = others[: 2 * self._has_keys], others[2 * self._has_keys :]
        gate_TG = others.pop() if self._has_first_gates else None
        normed = q if self._query_norm is None else self._query_norm(q)
        if latent.joins_query_vectors:
            normed_and_raw = torch.cat((normed, q), -1)
        if self._queries is not None:
            q = self._queries(normed_and_raw if latent.joins_query_vectors else normed)
        num_elements = self._num_heads * (latent.plain_dim + latent.rotary_dim)
        q, index_queries_TF = q[:, :num_elements], q[:, num_elements:]
        if latent.joins_query_vectors:
            gate_TG = index_queries_TF
        if self._index_queries is not None:
            input_norm = None if self._indexer is None else self._indexer.input_norm
            index_queries_TF = self._index_queries(normed if input_norm is None else input_norm(x))
        q_THP, q_THR = q.unflatten(-1, (self._num_heads, -1)).split(
            (latent.plain_dim, latent.rotary_dim), -1
        )
        rotated_TSR = q_THR
        if stored:
            c_TC, k_TR = stored
            if self._rotated_norm is not None:
                k_TR = self._rotated_norm(k_TR)
            rotated_TSR = torch.cat((q_THR, k_TR.unsqueeze(1)), 1)
        if tables is not None:
            rotated_TSR = apply_rotary(rotated_TSR, tables)
        q_THC = _multiply_heads(q_THP, self._keys_HPC)
        q_THK = self._filled(torch.cat((q_THC, rotated_TSR[:, : self._num_heads]), -1))
        if self._query_scaling is not None:
            q_THK = scale_queries(q_THK, positions_T, self._query_scaling)
        if self._scales is not None:
            q_THK = self._scales.scale(q_THK, positions_T)
        k_T1K = None
        if self._source is not None:
            k_T1K = self._source.kept_T1K
        elif self._key_norm is not None:
            c_T1C = self._key_norm(c_TC).unsqueeze(1)
            k_T1K = self._filled(torch.cat((c_T1C, rotated_TSR[:, self._num_heads :]), -1))
        if self._keeps_keys:
            self.kept_T1K = k_T1K
        index = None
        if self._indexer is not None:
            index = self._indexer.queries(others, index_queries_TF, positions_T, tables)
        if k_T1K is None:
            attended_THC = self._backend.attend(q_THK, kv_cache, attn_metadata, self._layer)
        else:
            attended_THC = self._backend.forward_projected(
                torch.cat((q_THK, k_T1K), 1),
                k_T1K,
                None,
                None,
                kv_cache,
                attn_metadata,
                self._layer,
                index,
            )
        out_THV = _multiply_heads(attended_THC, self._values_HCV)
        if gate_TG is not None:
            out_THV = out_THV * torch.sigmoid(gate_TG.unflatten(-1, (self._num_heads, -1)))
        return self._output(out_THV.flatten(1))

    def store_keys(
        self, x: Any, tables: RotaryTables | None, kv_cache: Tensor, attn_metadata: Any
    ) -> None:
        """Store the keys of `x`, in a layer without an indexer that does not read the keys of another layer."""
        assert self._key_norm is not None
        _, c_TC, k_TR = self.qkv(x).split(self._sizes, -1)[:3]
        k_T1R = (k_TR if self._rotated_norm is None else self._rotated_norm(k_TR)).unsqueeze(1)
        if tables is not None:
            k_T1R = apply_rotary(k_T1R, tables)
        k_T1K = self._filled(torch.cat((self._key_norm(c_TC).unsqueeze(1), k_T1R), -1))
        self._backend.store(k_T1K, k_T1K, kv_cache, attn_metadata, self._layer)

    def copy_keys(self, source: LatentAttention) -> None:
        """Store copies of the keys of another layer, which must run first in every step."""
        self._source = source
        source._keeps_keys = True

    def _filled(self, x_THK: Tensor) -> Tensor:
        """Return queries or keys with zeros in the place of the rotated elements that the layer lacks."""
        return F.pad(x_THK, (0, self._num_missing)) if self._num_missing else x_THK


def gates_of_head(spec: ModelSpec, latent: LatentSpec) -> int:
    """Return the number of a head's gates: one, or one for each element of its value."""
    return 1 if spec.has_head_gates else latent.value_dim


def gate_rows(spec: ModelSpec, latent: LatentSpec, prefix: str, heads: range) -> Rows:
    """Return the rows of the projection to the gates of these heads."""
    size = gates_of_head(spec, latent)
    if latent.joins_query_vectors:
        query_size = latent.plain_dim + latent.rotary_dim
        return _joined_rows(spec, latent, prefix, heads, query_size + torch.arange(size))
    part = elements(heads, size)
    return Rows(f"{prefix}gate_proj", spec.num_heads * size, part, has_bias=False)


def read_expansions(
    spec: ModelSpec, latent: LatentSpec, weights: WeightReader, prefix: str, heads: range
) -> tuple[Tensor, Tensor]:
    """Return the matrices that expand latent vectors to these heads' keys [H, P, C] and values [H, V, C].

    They are stored as one tensor, or as two tensors per head; the tensor for keys is transposed.
    """
    plain, value, rank = latent.plain_dim, latent.value_dim, latent.kv_rank
    if not has_split_expansions(weights, prefix):
        size = plain + value
        expand_HOC = weights.read(
            f"{prefix}kv_b_proj.weight",
            spec.num_heads * size,
            rank,
            part=elements(heads, size),
        ).unflatten(0, (len(heads), size))
        keys_HPC, values_HVC = expand_HOC.split((plain, value), 1)
        return keys_HPC, values_HVC
    names = [(f"{prefix}k_b_proj.{head}.", f"{prefix}v_b_proj.{head}.") for head in heads]
    keys = [weights.read(f"{name}weight", rank, plain).T for name, _ in names]
    values = [weights.read(f"{name}weight", value, rank) for _, name in names]
    skip_other_heads(spec, weights, prefix, heads)
    return torch.stack(keys), torch.stack(values)


def has_split_expansions(weights: WeightReader, prefix: str) -> bool:
    """Return whether keys and values of each head have separate matrices, as in GGUF files."""
    return weights.has(f"{prefix}k_b_proj.0.weight")


def skip_other_heads(spec: ModelSpec, weights: WeightReader, prefix: str, heads: range) -> None:
    """Mark the separate matrices of other ranks' heads as not needed."""
    others = [head for head in range(spec.num_heads) if head not in heads]
    weights.skip([f"{prefix}{kind}_b_proj.{head}." for kind in "kv" for head in others])


def first_rows(spec: ModelSpec, latent: LatentSpec, prefix: str, heads: range) -> list[Rows]:
    """Return two lists of rows of the projections of hidden states, in the order that rotation needs.

    The first are the rows to these heads' queries, or to the vector from which queries are computed. The second are the
    rows to the latent vector and the rotated key.
    """
    if latent.query_rank is None:
        first = query_rows(spec, latent, prefix, heads)
    else:
        first = Rows(f"{prefix}q_a_proj", latent.query_rank, range(latent.query_rank))
    order_R = rotary_order(spec.rope_order, latent.rotary_dim)
    order_K = torch.cat((torch.arange(latent.kv_rank), latent.kv_rank + order_R))
    return [first, Rows(f"{prefix}kv_a_proj_with_mqa", len(order_K), range(len(order_K)), order_K)]


def query_rows(spec: ModelSpec, latent: LatentSpec, prefix: str, heads: range) -> Rows:
    """Return the rows of the projection to these heads' queries."""
    order_R = rotary_order(spec.rope_order, latent.rotary_dim)
    size = latent.plain_dim + latent.rotary_dim
    order_Q = torch.cat((torch.arange(latent.plain_dim), latent.plain_dim + order_R))
    if latent.joins_query_vectors:
        return _joined_rows(spec, latent, prefix, heads, order_Q)
    rows_HQ = torch.arange(len(heads) * size).view(len(heads), size)[:, order_Q]
    name = "q_proj" if latent.query_rank is None else "q_b_proj"
    part = elements(heads, size)
    return Rows(f"{prefix}{name}", spec.num_heads * size, part, rows_HQ.flatten(), has_bias=False)


def _joined_rows(
    spec: ModelSpec, latent: LatentSpec, prefix: str, heads: range, order_X: Tensor
) -> Rows:
    """Return the rows `order_X` of each of these heads in the matrix of queries and gates."""
    size = latent.plain_dim + latent.rotary_dim + gates_of_head(spec, latent)
    rows_HX = torch.arange(len(heads) * size).view(len(heads), size)[:, order_X]
    part = elements(heads, size)
    return Rows(f"{prefix}q_b_proj", spec.num_heads * size, part, rows_HX.flatten(), has_bias=False)


def _multiply_heads(x_THI: Tensor, weight_HIO: Tensor) -> Tensor:
    """Multiply each head by its own matrix. Return [T, H, O]."""
    x_HTI = x_THI.transpose(0, 1)
    if len(x_THI) == 1:
        # A product with a single row sums in another order, so double the row.
        return torch.bmm(x_HTI.expand(-1, 2, -1), weight_HIO)[:, :1].transpose(0, 1)
    return torch.bmm(x_HTI, weight_HIO).transpose(0, 1)
