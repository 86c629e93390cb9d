"""Record the attention of a layer in a native program."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from ...layers.layer_spec import LayerSpec
from ...layers.layers import HeadLayerNorm, LayerNorm
from ...layers.parallel.tensor_parallel import elements
from ...layers.rope import RopeSpec
from ...layers.spec import ModelSpec
from ...layers.specs.block_indexer import BlockIndexerSpec
from ...layers.specs.norm_names import NormNames
from ...models.attention import head_norm, head_norm_eps, qkv_rows
from ...models.attention_kinds.full_norm import read_full_norm
from ...models.cross_attention import cross_rows
from ...models.indexers.blocks import block_index_rows, mean_index_rows
from ...models.positions.relative_biases import RelativeBiases
from ...models.projections import input_of_rows, sink_rows, tap_rows
from ...models.weights import Rows
from ..abi import structs
from ..abi.structs import AttentionLayer, ChoiceRule
from ..library import NotSupportedNatively
from ..packing import GROUP_SIZE, ActivationKind, PackedWeight
from ..program import Floats
from .blocks import BLOCK, PART, QKV, SHORTCUT, BlockRecorder
from .inner_convolutions import ConvolutionRecorder
from .native_values import scaling_array, window_size
from .score_biases import LOG2_E, native_relative_biases, read_biases
from .streams.altup import AltUpRecorder
from .streams.attention_residuals import AttentionResidualRecorder


class QKNorm(IntEnum):
    """The values of the native enum of norms of queries and keys; see `csrc/model/model.h`."""

    NONE = 0
    HEAD = 1
    FULL = 2
    EACH_HEAD = 3
    BOUNDED = 4
    FULL_LAYER = 5


class AttentionMatrices(msgspec.Struct, frozen=True):
    """The matrices of a layer's attention.

    The first `num_qkv` matrices of `inputs` give queries, keys, values and gates. The others give an indexer's queries
    and key, or the factors of `relative_biases`, sinks, and the taps of convolutions from `first_tap` on.
    """

    inputs: list[PackedWeight]
    biases: list[Floats | None]
    num_qkv: int
    output: PackedWeight
    relative_biases: structs.RelativeBiases | None
    first_tap: int
    input_of_each: list[int]


class AttentionRecorder:
    """Records the attention of layers. `ropes` maps rotary embeddings to their indices in the program."""

    def __init__(
        self,
        blocks: BlockRecorder,
        ropes: Mapping[RopeSpec, int],
        max_model_len: int,
        altup: AltUpRecorder | None = None,
        streams: AttentionResidualRecorder | None = None,
    ) -> None:
        self._blocks = blocks
        self._altup, self._streams = altup, streams
        self._ropes = ropes
        self._program, self._spec = blocks.program, blocks.spec
        self._shard, self._weights = blocks.shard, blocks.weights
        self._max_distance = max_model_len
        self._num_cross = 0
        self._shared_biases: Floats | None = None
        if not self._spec.has_layer_distance_biases:
            self._shared_biases = read_biases(blocks, max_model_len)

    def record(
        self,
        index: int,
        prefix: str,
        layer: LayerSpec,
        norms: NormNames,
        input_kind: ActivationKind | None,
        convolutions: ConvolutionRecorder | None = None,
        store: BlockRecorder | None = None,
    ) -> None:
        """Record the attention of a layer.

        Args:
            index: The index of the layer's KV cache.
            prefix: The prefix of the layer's tensors.
            layer: The layer.
            norms: The names of the layer's norms.
            input_kind: The format in which the input has already been quantized, or None.
            convolutions: The convolutions of keys, values and outputs, if the layer has any.
            store: The recorder of a program that only stores keys and values, if there is one.
        """
        matrices = self.read(prefix, layer)
        if store is not None:
            self._record_keys(index, prefix, layer, matrices, store)
        parts, biases = matrices.inputs, matrices.biases
        if input_kind is not None and any(
            part.activation_kind.for_whole_rows != input_kind for part in parts
        ):
            raise NotSupportedNatively(
                "the native CPU backend does not support layers whose attention and recurrent parts have "
                "different weight formats"
            )
        if self._altup is not None:
            parts = [*parts, self._altup.laurel_projection(prefix)]
            biases = [*biases, None]
        if layer.input_norms:
            self._add_projections(prefix, layer, matrices)
        else:
            self._blocks.add_projection(
                prefix,
                norms.attention_input,
                parts,
                biases,
                input_kind,
                input_size=layer.input_size,
            )
        if self._altup is not None:
            assert norms.attention_input is not None
            first_column = sum(part.n for part in matrices.inputs)
            self._altup.add_laurel(prefix, norms.attention_input, first_column)
        # In a parallel layer, the MLP or the experts, which use the block, read the stream as it was before attention.
        target = None
        if self._spec.is_parallel:
            target = BLOCK if layer.experts is None else SHORTCUT
        if convolutions is not None:
            convolutions.convolve_projection(matrices.first_tap)
            target = BLOCK
        if norms.attention_sum is None:
            self.attend(index, prefix, layer, matrices, norms.attention_output, target)
        else:
            self.attend(index, prefix, layer, matrices, None, BLOCK)
            self._blocks.add_normed_sum(f"{prefix}{norms.attention_sum}")
            assert norms.attention_output is not None
            self._blocks.add_normed(f"{prefix}{norms.attention_output}", 1.0)
        if convolutions is not None:
            convolutions.finish_attention()

    def _record_keys(
        self,
        index: int,
        prefix: str,
        layer: LayerSpec,
        matrices: AttentionMatrices,
        store: BlockRecorder,
    ) -> None:
        """Record, in another program, the operations that only store the keys and values of its residual stream."""
        spec = self._spec.for_layer(layer)
        qk_norm, head_norms = self._head_norms(spec, prefix, layer)
        queries, *parts = matrices.inputs[: matrices.num_qkv]
        # The first columns are for queries, which nothing reads.
        store.add_projection(prefix, None, parts, matrices.biases[1:], first_column=queries.n)
        fields = {
            "rope": -1 if layer.rope is None else self._ropes[layer.rope],
            "scale": spec.qkv_clip or 0.0,
            "num_stored": 1 + layer.has_value_projection,
            "norms_values": spec.has_value_norm,
        }
        self._add_storing(
            store, spec, index, layer.kv_cache_group, (qk_norm, *head_norms), **fields
        )

    def _add_storing(
        self,
        store: BlockRecorder,
        spec: ModelSpec,
        index: int,
        group: int,
        norms: tuple[QKNorm, *tuple[Floats | None, ...]],
        **others: Any,
    ) -> None:
        """Record that keys and values of the projection are stored. `norms` are their kind, and the weights."""
        fields: dict[str, Any] = {"rope": -1, "num_stored": 2, "scale": 0.0}
        store.program.add_op(
            "rotate_store",
            vectors=[*norms[1:], None],
            qk_norm=norms[0],
            layer=index,
            group=group,
            attention=AttentionLayer(spec.attention_scale, spec.attention_softcap or 0.0, 0),
            num_heads=len(self._shard.heads(spec)),
            num_kv_heads=len(self._shard.kv_heads(spec)),
            head_dim=spec.head_dim,
            eps=head_norm_eps(spec),
            **fields | others,
        )

    def _add_projections(self, prefix: str, layer: LayerSpec, matrices: AttentionMatrices) -> None:
        """Record the first products of separate inputs, which are means of the streams."""
        assert self._streams is not None
        places = list(accumulate((part.n for part in matrices.inputs), initial=0))
        for number, norm in enumerate(layer.input_norms):
            self._streams.read(number, places[-1])
            kind = None
            for part, place, own in zip(
                matrices.inputs, places, matrices.input_of_each, strict=False
            ):
                if own == number:
                    kind = self._blocks.add_projection(prefix, norm, [part], [None], kind, place)

    def read(self, prefix: str, layer: LayerSpec) -> AttentionMatrices:
        """Return the matrices of a layer's attention."""
        spec, shard, name = self._spec.for_layer(layer), self._shard, f"{prefix}self_attn."
        rows = qkv_rows(spec, layer, self._weights, name, shard)
        of_index = []
        if spec.block_indexer is not None and layer.chooses_keys:
            of_index = _index_rows(spec, spec.block_indexer, name, shard.kv_heads(spec))
        others, relative = of_index, None
        taps = tap_rows(spec, layer, name, shard)
        if spec.relative_biases is not None:
            heads, count = shard.heads(spec), sum(len(each.part) for each in rows)
            biases_of = RelativeBiases(
                spec, spec.relative_biases, layer, self._weights, name, heads
            )
            sinks = sink_rows(spec, name, heads)
            others = [biases_of.rows, *sinks, *taps]
            relative = native_relative_biases(biases_of, count, bool(sinks), spec.head_bound)
        all_rows = [*rows, *others]
        num_columns = sum(len(each.part) for each in all_rows)
        inputs, biases = self._blocks.packed_rows(
            all_rows, spec.qkv_bias or spec.has_gate_biases, layer.input_size
        )
        output = attention_output(self._blocks, spec, prefix, spec.output_dim)
        columns = len(shard.heads(spec)) // len(shard.kv_heads(spec)) * spec.output_dim
        if output.activation_kind == ActivationKind.INT8 and columns % GROUP_SIZE:
            raise NotSupportedNatively(
                f"{columns} query elements per key/value head are not a multiple of the group size "
                f"{GROUP_SIZE}"
            )
        first_tap = num_columns - sum(len(each.part) for each in taps) if taps else 0
        of_inputs = [input_of_rows(each) for each in all_rows]
        return AttentionMatrices(inputs, biases, len(rows), output, relative, first_tap, of_inputs)

    def attend(
        self,
        index: int,
        prefix: str,
        layer: LayerSpec,
        matrices: AttentionMatrices,
        output_norm: str | None,
        target: int | None,
    ) -> None:
        """Record what follows the first products of `record`. `target` is the place of the output, if given."""
        spec, shard, output = self._spec.for_layer(layer), self._shard, matrices.output
        indexer = spec.block_indexer if layer.chooses_keys else None
        qk_norm, head_norms = self._head_norms(spec, prefix, layer)
        attention: dict[str, Any] = {
            "layer": index,
            "group": layer.kv_cache_group,
            "attention": AttentionLayer(
                spec.attention_scale,
                spec.attention_softcap or 0.0,
                window_size(layer.window),
                spec.rounds_alibi,
            ),
            "num_heads": len(shard.heads(spec)),
            "num_kv_heads": len(shard.kv_heads(spec)),
            "head_dim": spec.head_dim,
            "relative_biases": matrices.relative_biases,
        }
        of_qkv = matrices.inputs[: matrices.num_qkv]
        indexing = attention | {"first_column": sum(part.n for part in of_qkv)}
        if indexer is not None:
            indexing |= self._index_operands(prefix, layer, indexer)
            self._program.add_op("store_index", **indexing)
        norm_target = QKV
        if qk_norm == QKNorm.FULL and not self._blocks.is_alone:
            norm_target = PART
            self._program.add_op("share_head_squares", **attention)
        self._program.add_op(
            "rotate_store",
            target=norm_target,
            rope=-1 if layer.rope is None else self._ropes[layer.rope],
            num_stored=0 if layer.kv_source is not None else 1 + layer.has_value_projection,
            norms_values=spec.has_value_norm,
            scale=spec.qkv_clip or 0.0,
            qk_norm=qk_norm,
            eps=head_norm_eps(spec),
            rotates_before_norm=spec.rotates_before_norm,
            vectors=[*head_norms, scaling_array(layer.query_scaling)],
            **attention,
        )
        if indexer is not None and indexer.num_heads:
            self._program.add_op("average_group", **indexing)
            weights = np.ones(indexer.num_heads, np.float32)
            self._program.add_op("choose_keys", **indexing | {"vectors": [weights]})
        elif indexer is not None:
            self._program.add_op("choose_keys", **indexing)
        distance_biases = self._shared_biases
        if self._spec.has_layer_distance_biases:
            distance_biases = read_biases(self._blocks, self._max_distance, f"{prefix}self_attn.")
        gates = sum(len(heads) for heads in (shard.heads(spec), *[shard.kv_heads(spec)] * 2))
        self._program.add_op(
            "attention",
            is_sparse=indexer is not None,
            norms_values=spec.norms_heads,
            activation_kind=ActivationKind.F32 if spec.has_inner_norms else output.activation_kind,
            vectors=[read_sinks(self._blocks, prefix, layer), distance_biases],
            num_columns=self._max_distance,
            first_column=gates * spec.head_dim if spec.gates_attention else 0,
            output_dim=spec.output_dim,
            **attention,
        )
        if spec.has_inner_norms:
            size, part = (
                spec.num_heads * spec.output_dim,
                elements(shard.heads(spec), spec.output_dim),
            )
            self._blocks.add_inner_norm(f"{prefix}self_attn.attn_sub_norm", size, part, output)
        bias = None
        if spec.attention_output_bias:
            bias = self._weights.vector(f"{prefix}self_attn.o_proj.bias", spec.hidden_size)
        self._blocks.add_block(
            prefix,
            output,
            bias,
            output_norm,
            spec.attention_multiplier,
            source=0 if spec.has_inner_norms else 1,
            target=target,
        )

    def _index_operands(
        self, prefix: str, layer: LayerSpec, indexer: BlockIndexerSpec
    ) -> dict[str, Any]:
        norms = ("q_layernorm", "k_layernorm") if indexer.num_heads else ("q_norm", "k_norm")
        return {
            "rope": -1 if layer.rope is None else self._ropes[layer.rope],
            "vectors": [
                self._blocks.norm(f"{prefix}self_attn.indexer.{name}", indexer.head_dim)
                for name in norms
            ],
            "choice": ChoiceRule(
                indexer.num_chosen,
                indexer.block_size,
                indexer.num_local,
                bool(indexer.num_heads),
                indexer.num_heads,
            ),
        }

    def record_cross(self, index: int, prefix: str, layer: LayerSpec, norms: NormNames) -> None:
        """Record the attention of a layer to an encoder's outputs. `index` is the index of its KV cache."""
        spec = self._spec
        qk_norm, query_norm, _ = self._cross_norms(prefix)
        query_rows, _ = cross_rows(spec, self._weights, f"{prefix}cross_attn.", self._shard)
        queries, biases = self._blocks.packed_rows([query_rows], spec.qkv_bias)
        output = attention_output(self._blocks, spec, prefix, spec.head_dim, "cross_attn")
        self._blocks.add_projection(prefix, norms.cross_input, queries, biases)
        attention: dict[str, Any] = {
            "layer": index,
            "group": layer.cross_group,
            "reads_source": True,
            "attention": AttentionLayer(spec.attention_scale, spec.attention_softcap or 0.0, 0),
            "num_heads": len(self._shard.heads(spec)),
            "num_kv_heads": len(self._shard.kv_heads(spec)),
            "head_dim": spec.head_dim,
        }
        # `num_columns` holds the layer's position among the shard's layers that read a source.
        self._program.add_op(
            "rotate_store",
            rope=-1,
            vectors=[query_norm, None, None],
            num_columns=self._num_cross,
            qk_norm=qk_norm,
            eps=spec.norm_eps,
            **attention,
        )
        self._num_cross += 1
        self._program.add_op(
            "attention",
            activation_kind=output.activation_kind,
            **attention,
        )
        bias = None
        if spec.attention_output_bias:
            bias = self._weights.vector(f"{prefix}cross_attn.o_proj.bias", spec.hidden_size)
        if qk_norm != QKNorm.NONE:
            self._blocks.add_read_block(f"{prefix}cross_attn_attn_gate", output)
            return
        self._blocks.add_block(prefix, output, bias, norms.cross_output, spec.attention_multiplier)

    def record_storing(self, index: int, group: int, prefix: str, store: BlockRecorder) -> None:
        """Record, in another program, the operations that store the keys and values for `record_cross`.

        Args:
            index: The index of the layer's KV cache.
            group: Its group.
            prefix: The prefix of the layer's tensors.
            store: The recorder of the other program, whose residual stream contains the encoder's outputs.
        """
        spec = self._spec
        query_rows, kv_rows = cross_rows(spec, self._weights, f"{prefix}cross_attn.", self._shard)
        parts, biases = store.packed_rows(kv_rows, spec.qkv_bias)
        # The first columns are for queries, which nothing reads.
        store.add_projection(prefix, None, parts, biases, first_column=len(query_rows.part))
        self._add_storing(store, spec, index, group, self._cross_norms(prefix))

    def _cross_norms(self, prefix: str) -> tuple[QKNorm, Floats | None, Floats | None]:
        """Return the kind of the norms of cross attention's queries and keys, and their weights."""
        spec = self._spec
        if spec.source is None or not spec.source.has_norms:
            return QKNorm.NONE, None, None
        query_norm, key_norm = (
            self._weights.vector(f"{prefix}cross_attn.{name}_norm.weight", spec.head_dim)
            for name in "qk"
        )
        return QKNorm.HEAD, query_norm, key_norm

    def _head_norms(
        self, spec: ModelSpec, prefix: str, layer: LayerSpec
    ) -> tuple[QKNorm, list[Floats | None]]:
        """Return the kind of the norms of queries and keys, and their weight vectors.

        `spec` has the sizes of the layer. A layer that reads the keys of another one has no norm of keys.
        """
        prefix = f"{prefix}self_attn."
        if spec.qk_norm is None or (spec.qk_norm == "unit" and layer.rope is None):
            return QKNorm.NONE, [None, None]
        if spec.qk_norm == "full":
            heads = (
                (spec.num_heads, self._shard.heads(spec)),
                (
                    spec.num_kv_heads,
                    self._shard.kv_heads(spec),
                ),
            )
            norms = []
            for name, (count, own) in zip(("q_norm", "k_norm"), heads, strict=True):
                full_norm = read_full_norm(spec, self._weights, f"{prefix}{name}.", count)
                vectors = [full_norm.weight]
                if isinstance(full_norm, LayerNorm):
                    no_bias = full_norm.weight.new_zeros(len(full_norm.weight))
                    vectors.append(no_bias if full_norm.bias is None else full_norm.bias)
                part = elements(own, spec.head_dim)
                norms.append(np.concatenate([x[part.start : part.stop].numpy() for x in vectors]))
            return QKNorm.FULL_LAYER if spec.norm_kind == "layer" else QKNorm.FULL, [*norms]
        if spec.qk_norm == "head" and spec.norm_kind == "rms" and spec.rope_order == "half":
            query_norm = self._blocks.norm(f"{prefix}q_norm", spec.head_dim)
            if layer.kv_source is not None:
                return QKNorm.HEAD, [query_norm, None]
            return QKNorm.HEAD, [query_norm, self._blocks.norm(f"{prefix}k_norm", spec.head_dim)]
        norm = head_norm(spec, layer, self._weights, prefix, self._shard)
        if spec.qk_norm == "bounded":
            scales_HK = norm.weight_HK[: len(self._shard.heads(spec))]
            return QKNorm.BOUNDED, [np.ascontiguousarray(scales_HK.float().numpy()), None]
        bias_HK = norm.bias_HK if isinstance(norm, HeadLayerNorm) else None
        return QKNorm.EACH_HEAD, [
            None if x_HK is None else np.ascontiguousarray(x_HK.float().numpy())
            for x_HK in (norm.weight_HK, bias_HK)
        ]


def _index_rows(
    spec: ModelSpec, indexer: BlockIndexerSpec, prefix: str, kv_heads: range
) -> list[Rows]:
    """Return the rows of the projections to the index queries and the index key of a layer."""
    if indexer.num_heads:
        return mean_index_rows(indexer, prefix)
    return block_index_rows(spec, indexer, prefix, kv_heads)


def attention_output(
    blocks: BlockRecorder, spec: ModelSpec, prefix: str, head_size: int, module: str = "self_attn"
) -> PackedWeight:
    """Return this rank's part of the output projection, which reads `head_size` elements per head."""
    num_heads = spec.num_heads
    shares = [elements(heads, head_size) for heads in blocks.shard.tensor_parallel.parts(num_heads)]
    return blocks.output_projection(
        f"{prefix}{module}.o_proj.weight", num_heads * head_size, shares
    )


def read_sinks(blocks: BlockRecorder, prefix: str, layer: LayerSpec) -> Floats | None:
    """Return the additional score of each of this rank's heads, or None if the layer has none."""
    spec = blocks.spec
    if not (spec.has_sinks and layer.has_sinks):
        return None
    heads = blocks.shard.heads(spec)
    return blocks.weights.vector(f"{prefix}self_attn.sinks", spec.num_heads, heads) * LOG2_E
