"""Record compressed attention in a native program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...layers.layer_spec import LayerSpec
from ...layers.parallel.tensor_parallel import elements
from ...layers.rope import RopeSpec
from ...layers.specs.compressed import CompressedSpec, Compression
from ...layers.specs.latent import IndexerSpec
from ...layers.specs.norm_names import NormNames
from ...models.compressed.attention import group_columns, group_rows
from ...models.compressed.compressor import input_rows, read_biases
from ...models.weights import Rows
from ..abi import structs
from ..abi.structs import AttentionLayer, ChoiceRule
from ..head_matrices import HeadMatrices
from ..library import NotSupportedNatively
from ..packing import GROUP_SIZE, ActivationKind
from ..program import Floats
from .attention import QKNorm
from .blocks import BlockRecorder
from .score_biases import LOG2_E


class CompressedRecorder:
    """Records the compressed attention of layers.

    A token's projection has its queries and its key, its inputs to entries, the weights and queries of the indexer's
    heads, and the vector from which all queries are computed. `ropes` maps rotary embeddings to their indices in the
    program.
    """

    def __init__(self, blocks: BlockRecorder, ropes: Mapping[RopeSpec, int]) -> None:
        self._blocks = blocks
        self._ropes = ropes
        self._program, self._spec = blocks.program, blocks.spec
        self._shard, self._weights = blocks.shard, blocks.weights

    def record(
        self,
        index: int,
        prefix: str,
        layer: LayerSpec,
        norms: NormNames,
        compressed: CompressedSpec,
    ) -> None:
        """Record the attention of a layer. `index` is the index of its cache of keys."""
        spec, weights, program = self._spec, self._weights, self._program
        name, heads, size = f"{prefix}self_attn.", self._shard.heads(spec), spec.head_dim
        rank = compressed.query_rank
        compression = layer.compression
        has_indexer = compression is not None and compression.has_indexer
        indexer = compressed.indexer if has_indexer else None
        inputs = self._input_rows(name, compression, indexer)
        num_inputs = sum(rows.count for rows in inputs)
        key_column = len(heads) * size
        input_column = key_column + size
        weight_column = input_column + num_inputs
        query_column = weight_column + (0 if indexer is None else indexer.num_heads)
        vector_column = input_column + sum(extra_columns(layer, compressed, size))
        if indexer is not None:
            count = indexer.num_heads
            module = f"{name}compressor.indexer.weights_proj"
            inputs.append(Rows(module, count, range(count)))
        first = [
            Rows(f"{name}q_a_proj", rank, range(rank)),
            Rows(f"{name}kv_proj", size, range(size)),
        ]
        kind = None
        places = [
            (part, column)
            for part, column in zip(
                self._blocks.packed_rows(first, False)[0], (vector_column, key_column), strict=True
            )
        ]
        if inputs:
            column = input_column
            for part in self._blocks.packed_rows(inputs, False)[0]:
                places.append((part, column))
                column += part.n
        for part, column in places:
            kind = self._blocks.add_projection(
                prefix, norms.attention_input, [part], [None], kind, column
            )
        self._record_queries(name, compressed, indexer, vector_column, query_column)
        assert layer.rope is not None
        attention: dict[str, Any] = {
            "layer": index,
            "group": layer.kv_cache_group,
            "rope": self._ropes[layer.rope],
            "attention": AttentionLayer(spec.attention_scale, 0.0, compressed.window),
            "num_heads": len(heads),
            "num_kv_heads": 1,
            "head_dim": size,
        }
        if compression is not None:
            entries = self._read_entries(compression, size, f"{name}compressor.")
            if indexer is not None:
                of_index = f"{name}compressor.indexer."
                entries += self._read_entries(compression, indexer.head_dim, of_index)
            attention["compression"] = structs.Compression(
                compression.rate,
                compression.overlaps,
                index + 1,
                layer.entries_group,
                0 if indexer is None else indexer.head_dim,
                0 if indexer is None else indexer.num_heads,
                *entries,
            )
        program.add_op(
            "rotate_store",
            num_stored=1,
            qk_norm=QKNorm.HEAD,
            vectors=[None, weights.vector(f"{name}kv_norm.weight", size), None],
            scale=0.0,
            first_column=input_column,
            num_columns=num_inputs,
            **attention,
        )
        if compression is not None:
            program.add_op("store_entries", **attention)
        if compression is not None and indexer is not None:
            rule = ChoiceRule(indexer.num_chosen, compression.rate, 0, True)
            attention |= {"choice": rule, "is_sparse": True}
            program.add_op("choose_keys", first_column=weight_column, **attention)
        sinks = weights.vector(f"{name}sinks", spec.num_heads, heads) * LOG2_E
        program.add_op(
            "attention", activation_kind=ActivationKind.F32, vectors=[sinks, None], **attention
        )
        self._record_output(prefix, norms, compressed)

    def _read_entries(self, compression: Compression, size: int, prefix: str) -> list[Floats]:
        """Return the biases of the logits of entries, or index keys, of `size` elements, and the norm of these."""
        biases = read_biases(compression, size, self._weights, prefix).numpy()
        return [biases, self._weights.vector(f"{prefix}kv_norm.weight", size)]

    def _input_rows(
        self, name: str, compression: Compression | None, indexer: IndexerSpec | None
    ) -> list[Rows]:
        """Return the matrices of a token's inputs to entries."""
        if compression is None:
            return []
        rows = input_rows(compression, self._spec.head_dim, f"{name}compressor.")
        if indexer is not None:
            rows += input_rows(compression, indexer.head_dim, f"{name}compressor.indexer.")
        return rows

    def _record_queries(
        self,
        name: str,
        compressed: CompressedSpec,
        indexer: IndexerSpec | None,
        vector_column: int,
        index_column: int,
    ) -> None:
        """Record the second products of queries, and those of an indexer's queries."""
        spec, heads, size = self._spec, self._shard.heads(self._spec), self._spec.head_dim
        rank = compressed.query_rank
        part = elements(heads, size)
        products = [(Rows(f"{name}q_b_proj", spec.num_heads * size, part), 0)]
        if indexer is not None:
            count = indexer.num_heads * indexer.head_dim
            rows = Rows(f"{name}compressor.indexer.q_b_proj", count, range(count))
            products.append((rows, index_column))
        packed = self._weights.packed_together([rows for rows, _ in products], rank)
        norm: Floats | None = self._weights.vector(f"{name}q_a_norm.weight", rank)
        vector = range(vector_column, vector_column + rank)
        for weight, (_, column) in zip(packed, products, strict=True):
            self._blocks.add_second_product(vector, weight, column, norm, spec.norm_eps)
            norm = None

    def _record_output(self, prefix: str, norms: NormNames, compressed: CompressedSpec) -> None:
        """Record the product of each group of heads, and the product of all their outputs."""
        spec, shard, name = self._spec, self._shard, f"{prefix}self_attn."
        rank, count = compressed.output_rank, compressed.num_groups
        parts = group_rows(compressed, shard)
        columns = group_columns(spec, compressed)
        groups = HeadMatrices(
            [
                self._weights.packed(f"{name}o_a_proj.weight", count * rank, columns, part)
                for part in parts
            ]
        )
        shares = shard.tensor_parallel.parts(count * rank)
        output = self._blocks.output_projection(f"{name}o_b_proj.weight", count * rank, shares)
        unit = {ActivationKind.INT8: GROUP_SIZE, ActivationKind.BF16: 2}
        if rank % unit.get(output.activation_kind, 1):
            raise NotSupportedNatively(
                f"{rank} outputs per group of heads (o_lora_rank) are not a multiple of "
                f"{unit[output.activation_kind]}"
            )
        self._program.add_op(
            "latent_values",
            input_kind=groups.activation_kind.for_whole_rows,
            activation_kind=output.activation_kind,
            num_heads=len(parts),
            heads=groups,
        )
        self._blocks.add_block(
            prefix, output, None, norms.attention_output, spec.attention_multiplier, source=0
        )


def extra_columns(layer: LayerSpec, compressed: CompressedSpec, head_dim: int) -> tuple[int, int]:
    """Return how many elements of a token's projection are inputs to entries, and how many belong to the indexer."""
    compression = layer.compression
    if compression is None:
        return 0, 0
    inputs = compressed.token_elements(head_dim, compression)[0] - head_dim
    indexer = compressed.indexer
    return inputs, indexer.num_heads * (1 + indexer.head_dim) if compression.has_indexer else 0
