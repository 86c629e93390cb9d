"""Record latent attention in a native program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...layers.layer_spec import LayerSpec
from ...layers.rope import RopeSpec
from ...layers.spec import ModelSpec
from ...layers.specs.latent import IndexerSpec, LatentSpec
from ...layers.specs.norm_names import NormNames
from ...models.attention import rotary_order
from ...models.indexers.keys import index_order, index_query_rows, index_rows
from ...models.latent.attention import first_rows, gate_rows, query_rows
from ..abi.structs import AttentionLayer, ChoiceRule, LatentShape
from ..head_matrices import read_head_matrices
from ..library import NotSupportedNatively
from ..packing import GROUP_SIZE, ActivationKind
from ..program import Floats
from .attention import attention_output, read_sinks
from .blocks import BlockRecorder
from .model_shape import latent_shape
from .native_values import scaling_array, window_size


class LatentRecorder:
    """Records the latent attention of layers.

    `ropes` maps rotary embeddings to their indices in the program, and `caches` maps layers to the indices of their
    first KV caches.
    """

    def __init__(
        self, blocks: BlockRecorder, ropes: Mapping[RopeSpec, int], caches: Mapping[int, int]
    ) -> None:
        self._blocks = blocks
        self._ropes = ropes
        self._caches = caches
        self._program, self._spec = blocks.program, blocks.spec
        self._shard, self._weights = blocks.shard, blocks.weights

    def record(
        self,
        index: int,
        prefix: str,
        layer: LayerSpec,
        norms: NormNames,
        store: BlockRecorder | None = None,
    ) -> None:
        """Record the latent attention of a layer.

        Args:
            index: The index of the layer's KV cache.
            prefix: The prefix of the layer's tensors.
            layer: The layer.
            norms: The names of the layer's norms.
            store: The recorder of a program that only stores the keys of its residual stream, if there is one.
        """
        spec, program = self._spec.for_layer(layer), self._program
        latent, heads, name = spec.latent, self._shard.heads(spec), f"{prefix}self_attn."
        assert latent is not None, "the layers of this model have latent attention"
        shape = latent_shape(spec, latent, len(heads))
        key_dim = shape.key_dim
        # The rows of an indexer do not depend on the rotary embedding of the layer.
        whole, latent = latent, latent.for_rope(layer.rope)
        first, keys = first_rows(spec, latent, name, heads)
        own_keys = [keys] if layer.kv_source is None else []
        indexer = latent.indexer if layer.chooses_keys else None
        of_index = [] if indexer is None else index_rows(whole, indexer, name)
        gates = []
        if spec.gates_attention and not latent.joins_query_vectors:
            gates.append(gate_rows(spec, latent, name, heads))
        inputs, biases = self._blocks.packed_rows(
            [*own_keys, *of_index, first, *gates], spec.qkv_bias, layer.input_size
        )
        key_matrices, value_matrices = read_head_matrices(spec, latent, self._weights, name, heads)
        output = attention_output(self._blocks, spec, prefix, latent.value_dim)
        unit = {ActivationKind.INT8: GROUP_SIZE, ActivationKind.BF16: 2}
        if latent.value_dim % unit.get(output.activation_kind, 1):
            raise NotSupportedNatively(
                f"{latent.value_dim} value elements per head are not a multiple of "
                f"{unit[output.activation_kind]}"
            )
        if latent.indexer is None and not gates and sum(len(x.part) for x in own_keys) == key_dim:
            self._blocks.add_projection(
                prefix, norms.attention_input, inputs, biases, input_size=layer.input_size
            )
        else:
            # The elements of the index key and its logits follow those of the key, even in layers without an indexer.
            places = [0] * len(own_keys)
            if indexer is not None:
                places += [key_dim, shape.index_offset]
                places += [key_dim + indexer.head_dim] * indexer.has_groups
            places.append(shape.query_offset)
            if gates:
                places.append(shape.gate_offset)
            kind = None
            for part, bias, place in zip(inputs, biases, places, strict=True):
                kind = self._blocks.add_projection(
                    prefix,
                    norms.attention_input,
                    [part],
                    [bias],
                    kind,
                    place,
                    layer.input_size,
                )
        if latent.query_rank is not None:
            self._record_queries(name, spec, shape, latent, whole, indexer)
        if indexer is not None and indexer.norms_inputs:
            self._record_normed_queries(prefix, norms.attention_input, shape, whole, indexer)
        if latent.has_log_scales:
            size = latent.plain_dim + latent.rotary_dim
            self._record_scales(name, shape.query_offset, spec.num_heads, heads, size)
        if indexer is not None and indexer.has_log_scales:
            count = indexer.num_heads
            first_column = shape.index_offset + count
            self._record_scales(
                f"{name}indexer.", first_column, count, range(count), indexer.head_dim
            )
        program.add_op(
            "latent_queries",
            num_heads=len(heads),
            input_kind=key_matrices.activation_kind.for_whole_rows,
            heads=key_matrices,
            latent=shape,
        )
        attention: dict[str, Any] = {
            "layer": index,
            "group": layer.kv_cache_group,
            "attention": AttentionLayer(
                spec.attention_scale, spec.attention_softcap or 0.0, window_size(layer.window)
            ),
            "num_heads": len(heads),
            "num_kv_heads": 1,
            "head_dim": key_dim,
            "latent": shape,
        }
        norm = None
        if layer.kv_source is None:
            norm = self._weights.vector(f"{name}kv_a_layernorm.weight", latent.kv_rank)
            norm = norm * np.float32(latent.multiplier)
            if latent.norms_rotated_key:
                order = rotary_order(spec.rope_order, latent.rotary_dim).numpy()
                rotated = self._weights.vector(f"{name}k_rotated_norm.weight", latent.rotary_dim)
                norm = np.concatenate([norm, rotated[order]])
        elif layer.chooses_keys:
            source = spec.layers[layer.kv_source].kv_cache_group
            of_source = {"layer": self._caches[layer.kv_source], "group": source}
            program.add_op("load_key", **attention | of_source)
        index_norm = None
        if indexer is not None:
            order = index_order(whole, indexer).numpy()
            index_norm = np.concatenate(
                [
                    self._weights.vector(f"{name}indexer.k_norm.{each}", indexer.head_dim)[order]
                    for each in ("weight", "bias")
                ]
            )
        storing: dict[str, Any] = attention | {
            "rope": -1 if layer.rope is None else self._ropes[layer.rope],
            "num_stored": int(layer.cache_source is None),
            "num_columns": latent.rotary_dim,
            "vectors": [norm, index_norm, scaling_array(layer.query_scaling)],
            "eps": latent.norm_eps,
        }
        program.add_op("rotate_store", **storing)
        if store is not None:
            store.add_projection(prefix, None, inputs[:1], biases[:1])
            store.program.add_op("rotate_store", **storing)
        if indexer is not None:
            self._record_choice(name, whole, indexer, attention)
        program.add_op(
            "attention",
            activation_kind=ActivationKind.F32,
            vectors=[read_sinks(self._blocks, prefix, layer)],
            is_sparse=latent.indexer is not None,
            **attention,
        )
        program.add_op(
            "latent_values",
            num_heads=len(heads),
            input_kind=value_matrices.activation_kind.for_whole_rows,
            activation_kind=output.activation_kind,
            heads=value_matrices,
            latent=shape,
        )
        bias = None
        if spec.attention_output_bias:
            bias = self._weights.vector(f"{name}o_proj.bias", spec.hidden_size)
        self._blocks.add_block(
            prefix, output, bias, norms.attention_output, spec.attention_multiplier, source=0
        )

    def _record_choice(
        self, name: str, latent: LatentSpec, indexer: IndexerSpec, attention: Mapping[str, Any]
    ) -> None:
        """Record the choice of keys, and before it the index keys of groups that are now complete, if there are any."""
        size = indexer.group_size
        choice = ChoiceRule(indexer.num_chosen, size, 0, indexer.has_groups)
        if indexer.has_groups:
            biases_PI = self._weights.read_float32(
                f"{name}indexer.position_bias", size, indexer.head_dim
            )[:, index_order(latent, indexer)]
            vector = biases_PI.flatten().numpy()
            self._program.add_op("summarize_group", vectors=[vector], choice=choice, **attention)
        self._program.add_op("choose_keys", choice=choice, **attention)

    def _record_queries(
        self,
        name: str,
        spec: ModelSpec,
        shape: LatentShape,
        latent: LatentSpec,
        whole: LatentSpec,
        indexer: IndexerSpec | None,
    ) -> None:
        """Record the second products of queries, of an indexer's queries and of joined gates.

        Queries overwrite the inputs of these products, so they come last. `latent` has the sizes of the layer, and
        `whole` those of its indexer.
        """
        rank = latent.query_rank
        assert rank is not None
        heads, first = self._shard.heads(spec), shape.query_offset
        vector, inputs = range(first, first + rank), range(first, first + latent.query_inputs)
        products = [(query_rows(spec, latent, name, heads), first)]
        of_index = []
        if indexer is not None and not indexer.norms_inputs:
            column = shape.index_offset + indexer.num_heads
            of_index.append((index_query_rows(whole, indexer, name), column))
        norm: Floats | None = self._weights.vector(f"{name}q_a_layernorm.weight", rank)
        if latent.joins_query_vectors:
            self._program.add_op(
                "norm_beside",
                first_column=first,
                num_columns=rank,
                vectors=[norm],
                eps=latent.norm_eps,
            )
            norm = None
            products.insert(0, (gate_rows(spec, latent, name, heads), shape.gate_offset))
            groups = [(vector, of_index), (inputs, products)]
        else:
            groups = [(vector, of_index + products)]
        for columns, group in groups:
            packed = self._weights.packed_together([rows for rows, _ in group], len(columns))
            for weight, (_, column) in zip(packed, group, strict=True):
                self._blocks.add_second_product(columns, weight, column, norm, latent.norm_eps)
                norm = None

    def _record_normed_queries(
        self,
        prefix: str,
        norm: str | None,
        shape: LatentShape,
        latent: LatentSpec,
        indexer: IndexerSpec,
    ) -> None:
        """Record the products of an indexer's queries, which read a layer norm of the layer's input."""
        name, size = f"{prefix}self_attn.", self._spec.hidden_size
        second_norm = np.concatenate(
            [
                self._weights.vector(f"{name}indexer.q_input_norm.{each}", size)
                for each in ("weight", "bias")
            ]
        )
        rows = index_query_rows(latent, indexer, name)
        parts = self._weights.packed_together([rows], size)
        kind = self._blocks.quantize(prefix, norm, parts, second_norm=second_norm)
        column = shape.index_offset + indexer.num_heads
        self._blocks.add_projection(prefix, norm, parts, [None], kind, column)

    def _record_scales(
        self, prefix: str, first_column: int, num_heads: int, heads: range, size: int
    ) -> None:
        """Record the stored factors of these heads, of `size` elements each, of `num_heads` in the checkpoint."""
        self._program.add_op(
            "scale_heads",
            first_column=first_column,
            num_heads=len(heads),
            head_dim=size,
            vectors=[
                self._weights.vector(f"{prefix}softmax_scaling.{kind}", num_heads, heads)
                for kind in ("scale", "bias")
            ],
        )
