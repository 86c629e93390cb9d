"""Records a model's operations in a native program while its weights are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...protocol.checkpoint.gguf import BLOCK_SIZES
from ..layers.rope import RopeSpec
from ..layers.spec import LayerSpec, ModelSpec
from ..models.weights import rows_of
from ..parallel.shard import ModelShard
from ..parallel.tensor_parallel import TensorParallel
from .library import AttentionLayer, NotSupportedNatively
from .program import Floats, NativeProgram
from .weights import GROUP_SIZE, ActivationKind, NativeWeightReader, PackedWeight

LARGEST_BLOCK = max(elements for elements, _ in BLOCK_SIZES.values())

_QKV, _RESIDUAL, _BLOCK, _PART = range(4)
_QK_NORMS = {None: 0, "head": 1, "full": 2}


def intermediate_shares(spec: ModelSpec, tensor_parallel: TensorParallel) -> list[range]:
    """Return each rank's share of the intermediate elements.

    Shares are whole blocks of stored weights if every rank can have at least one.
    """
    size = spec.intermediate_size
    for unit in (LARGEST_BLOCK, GROUP_SIZE):
        if size % unit == 0 and size // unit >= tensor_parallel.size:
            shares = tensor_parallel.parts(size // unit)
            return [range(share.start * unit, share.stop * unit) for share in shares]
    return tensor_parallel.parts(size)


class Recorder:
    """Records the layers of this shard, with their weights, in a program."""

    def __init__(
        self,
        program: NativeProgram,
        spec: ModelSpec,
        shard: ModelShard,
        weights: NativeWeightReader,
        max_model_len: int,
    ) -> None:
        self._program = program
        self._spec = spec
        self._shard = shard
        self._weights = weights
        self._is_alone = shard.tensor_parallel.size == 1
        self._ropes: dict[RopeSpec, int] = {}
        for layer in spec.layers:
            if layer.rope is not None and layer.rope not in self._ropes:
                program.add_rope(layer.rope, max_model_len)
                self._ropes[layer.rope] = len(self._ropes)

    def record(self) -> None:
        """Record all operations.

        Without an embedding, the program starts from the hidden states of the previous stage. Without a final norm, its
        hidden states are for the next stage.
        """
        spec, weights, shard, program = self._spec, self._weights, self._shard, self._program
        vocabulary = spec.vocab_size, spec.hidden_size, self._part(spec.vocab_size)
        scale = spec.rounded_embedding_scale(weights.dtype)
        if shard.is_first:
            embedding = weights.packed("embed_tokens.weight", *vocabulary)
            if self._is_alone:
                program.add_op("embed", parts=[embedding], scale=scale)
            else:
                program.add_op("embed", parts=[embedding])
                program.add_op("sum", target=_RESIDUAL, vectors=[None], scale=scale)
        else:
            program.add_op("embed")
        for place, index in enumerate(shard.layers):
            self._record_attention(place, f"layers.{index}.", spec.layers[index])
            self._record_mlp(f"layers.{index}.")
        if shard.is_last:
            program.add_op("final_norm", vectors=[self._norm("norm", spec.hidden_size)])
            if not spec.tie_word_embeddings:
                head = weights.packed_head(*vocabulary)
            elif shard.is_first:
                head = embedding
            else:
                head = weights.packed("embed_tokens.weight", *vocabulary)
            program.add_op(
                "head",
                input_kind=head.activation_kind.for_whole_rows,
                parts=[head],
                scale=1 / spec.logits_divisor,
                attention=AttentionLayer(softcap=spec.final_softcap or 0.0),
            )
        else:
            program.add_op("final_norm", vectors=[None])
            program.add_op("head")
        weights.finish()

    def _record_attention(self, index: int, prefix: str, layer: LayerSpec) -> None:
        """Record the attention of a layer. `index` is that of its KV cache."""
        spec, shard = self._spec, self._shard
        query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        queries, keys = self._elements(shard.heads(spec)), self._elements(shard.kv_heads(spec))
        qkv, biases = self._projections(
            f"{prefix}self_attn.",
            ["qkv_proj"] if spec.fused_projections else ["q_proj", "k_proj", "v_proj"],
            [query_size, kv_size, kv_size],
            [queries, keys, keys],
            spec.qkv_bias,
        )
        shares = map(self._elements, shard.tensor_parallel.parts(spec.num_heads))
        output = self._output_projection(f"{prefix}self_attn.o_proj.weight", list(shares))
        columns = len(shard.heads(spec)) // len(shard.kv_heads(spec)) * spec.head_dim
        if output.activation_kind == ActivationKind.INT8 and columns % GROUP_SIZE:
            raise NotSupportedNatively(
                f"{columns} query elements per key/value head are not a multiple of the group size "
                f"{GROUP_SIZE}"
            )
        input_kind = self._quantize(prefix, spec.norms.attention_input, qkv)
        self._program.add_op(
            "linear", input_kind=input_kind, source=0, target=_QKV, parts=qkv, vectors=biases
        )
        norms: list[Floats | None] = []
        if spec.qk_norm == "full" and not self._is_alone:
            raise NotSupportedNatively(
                "the native CPU backend does not support norms across all heads with "
                "--tensor-parallel-size"
            )
        if spec.qk_norm is not None:
            sizes = (
                (spec.head_dim, spec.head_dim) if spec.qk_norm == "head" else (query_size, kv_size)
            )
            norms = [
                self._norm(f"{prefix}self_attn.{name}", size)
                for name, size in zip(("q_norm", "k_norm"), sizes, strict=True)
            ]
        attention: dict[str, Any] = {
            "layer": index,
            "group": layer.kv_cache_group,
            "attention": AttentionLayer(
                spec.attention_scale, spec.attention_softcap or 0.0, layer.window or 0
            ),
        }
        self._program.add_op(
            "rotate_store",
            rope=-1 if layer.rope is None else self._ropes[layer.rope],
            qk_norm=_QK_NORMS[spec.qk_norm],
            vectors=norms,
            **attention,
        )
        self._program.add_op("attention", activation_kind=output.activation_kind, **attention)
        bias = None
        if spec.attention_output_bias:
            bias = self._weights.vector(f"{prefix}self_attn.o_proj.bias", spec.hidden_size)
        self._add_block(prefix, output, bias, spec.norms.attention_output)

    def _record_mlp(self, prefix: str) -> None:
        spec = self._spec
        shares = intermediate_shares(spec, self._shard.tensor_parallel)
        gate_up, biases = self._projections(
            f"{prefix}mlp.",
            ["gate_up_proj"] if spec.fused_projections else ["gate_proj", "up_proj"],
            [spec.intermediate_size] * 2,
            [shares[self._shard.tensor_parallel.rank]] * 2,
            spec.mlp_bias,
        )
        down = self._output_projection(f"{prefix}mlp.down_proj.weight", shares)
        input_kind = self._quantize(prefix, spec.norms.mlp_input, gate_up)
        self._program.add_op(
            "gated_linear",
            input_kind=input_kind,
            activation_kind=down.activation_kind,
            parts=gate_up,
            vectors=biases,
        )
        bias = None
        if spec.mlp_bias:
            bias = self._weights.vector(f"{prefix}mlp.down_proj.bias", spec.hidden_size)
        self._add_block(prefix, down, bias, spec.norms.mlp_output)

    def _quantize(
        self, prefix: str, norm: str | None, inputs: list[PackedWeight]
    ) -> ActivationKind:
        """Record the quantization of the residual stream, after an optional norm, for `inputs`. Return the format."""
        kind = inputs[0].activation_kind.for_whole_rows
        weight_D = None if norm is None else self._norm(f"{prefix}{norm}", self._spec.hidden_size)
        self._program.add_op("quantize", activation_kind=kind, vectors=[weight_D])
        return kind

    def _add_block(
        self, prefix: str, output: PackedWeight, bias: Floats | None, norm: str | None
    ) -> None:
        """Record the addition of a block's output projection, after an optional norm, to the residual stream."""
        target = _RESIDUAL if norm is None else _BLOCK
        scale = self._spec.residual_multiplier
        self._program.add_op(
            "linear",
            input_kind=output.activation_kind,
            source=1,
            target=target if self._is_alone else _PART,
            parts=[output],
            vectors=[bias if self._is_alone else None],
            scale=scale,
        )
        if not self._is_alone:
            self._program.add_op("sum", target=target, vectors=[bias], scale=scale)
        if norm is not None:
            weight_D = self._norm(f"{prefix}{norm}", self._spec.hidden_size)
            self._program.add_op("norm_add", vectors=[weight_D], scale=scale)

    def _norm(self, name: str, size: int) -> Floats:
        return self._weights.vector(f"{name}.weight", size) + np.float32(
            self._spec.norm_weight_offset
        )

    def _part(self, count: int) -> range:
        return self._shard.tensor_parallel.part(count)

    def _elements(self, heads: range) -> range:
        return range(heads.start * self._spec.head_dim, heads.stop * self._spec.head_dim)

    def _output_projection(self, name: str, shares: list[range]) -> PackedWeight:
        """Return the matrix that ends a block. Each rank has a share of its inputs."""
        hidden_size, inputs = self._spec.hidden_size, shares[-1].stop
        if self._is_alone:
            return self._weights.packed(name, hidden_size, inputs)
        rank = self._shard.tensor_parallel.rank
        return self._weights.packed_columns(name, hidden_size, inputs, shares, rank)

    def _projections(
        self, prefix: str, names: list[str], sizes: list[int], parts: list[range], has_bias: bool
    ) -> tuple[list[PackedWeight], list[Floats | None]]:
        """Return this rank's parts of matrices that read the residual stream, and of their biases.

        The matrices may be rows of one tensor.
        """
        reader, rows = self._weights, rows_of(names, sizes, parts)
        weights = reader.packed_together(
            [replace(each, name=f"{prefix}{each.name}.weight") for each in rows],
            self._spec.hidden_size,
        )
        biases: list[Floats | None] = [None] * len(rows)
        if has_bias:
            biases = [
                reader.vector(f"{prefix}{each.name}.bias", each.total, each.part) for each in rows
            ]
        return weights, biases
