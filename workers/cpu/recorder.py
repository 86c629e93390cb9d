"""Records a model's operations in a native program while its weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...protocol.checkpoint.recurrent_layers import RecurrentLayer, ShortConvolution
from ..layers.layers import HeadLayerNorm
from ..layers.rope import RopeSpec
from ..layers.spec import (
    Chunk,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    NormNames,
    QueryScaling,
    Window,
)
from ..models.attention import head_norm, qkv_rows
from ..models.decoder import check_num_positions
from ..models.latent_attention import first_rows, query_rows
from ..models.mlp import read_xielu
from ..models.weights import Rows
from ..parallel.shard import ModelShard
from .experts import NativeExperts
from .head_matrices import read_head_matrices
from .library import MAX_PARTS, AttentionLayer, NotSupportedNatively
from .mixers import NativeMixer
from .program import Floats, NativeProgram
from .weights import (
    GROUP_SIZE,
    ActivationKind,
    NativeWeightReader,
    PackedWeight,
    intermediate_shares,
)

_QKV, _RESIDUAL, _BLOCK, _PART, _ROUTER = range(5)
_LOG2_E = np.float32(np.log2(np.e))
"""Native softmaxes have base 2."""

_NO_NORM, _HEAD_NORM, _FULL_NORM, _EACH_HEAD_NORM = range(4)


@dataclass(frozen=True, slots=True)
class _MLP:
    gate_up: list[PackedWeight]
    biases: list[Floats | None]
    down: PackedWeight
    down_bias: Floats | None


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
        self._max_model_len = max_model_len
        self._is_alone = shard.tensor_parallel.size == 1
        self._ropes: dict[RopeSpec, int] = {}
        self._num_caches = 0
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
        if not (spec.is_causal or self._is_alone):
            raise NotSupportedNatively(
                "the native CPU backend does not support encoders with --tensor-parallel-size"
            )
        vocabulary = spec.vocab_size, spec.hidden_size, self._part(spec.vocab_size)
        scale = spec.rounded_embedding_scale(weights.dtype)
        if shard.is_first:
            embedding = self._embedding()
            tables = [embedding, *self._position_embeddings()]
            if self._is_alone:
                program.add_op("embed", parts=tables, scale=scale)
            else:
                program.add_op("embed", parts=tables)
                self._sum(_RESIDUAL, scale=scale)
        else:
            program.add_op("embed")
        if shard.is_first and spec.encoder is not None:
            program.add_op("place")
        if shard.is_first and spec.has_embedding_norm:
            program.add_op("norm", vectors=self._hidden_norm("embed_norm"))
        for place, index in enumerate(shard.layers):
            layer, prefix = spec.layers[index], f"layers.{index}."
            norms = layer.norms or spec.norms
            self._record_mixing(prefix, layer, norms)
            if layer.has_mlp and layer.experts is None:
                self._record_mlp(prefix, norms)
            elif layer.has_mlp and layer.experts is not None:
                self._record_experts(place, prefix, layer.experts, norms)
        if shard.is_last:
            norm = self._hidden_norm("norm") if spec.has_final_norm else [None]
            program.add_op("final_norm", vectors=norm)
            if not spec.tie_word_embeddings:
                head = weights.packed_head(*vocabulary)
            elif shard.is_first:
                head = embedding
            else:
                head = weights.packed("embed_tokens.weight", *vocabulary)
            bias = None
            if spec.head_bias:
                bias_v = weights.read_head_bias(spec.vocab_size, self._part(spec.vocab_size))
                bias = bias_v.float().numpy()
            program.add_op(
                "head",
                input_kind=head.activation_kind.for_whole_rows,
                parts=[head],
                vectors=[bias],
                scale=1 / spec.logits_divisor,
                attention=AttentionLayer(softcap=spec.final_softcap or 0.0),
            )
        else:
            program.add_op("final_norm", vectors=[None])
            program.add_op("head")
        weights.finish()

    def _record_mixing(self, prefix: str, layer: LayerSpec, norms: NormNames) -> None:
        """Record the attention and the recurrent part of a layer, as far as it has them.

        If it has both, the recurrent part is first, and the attention reads the same quantized input.
        """
        index = self._num_caches
        self._num_caches += len(layer.cache_groups)
        kind = None
        if layer.recurrent is not None:
            kind = self._record_mixer(index + layer.attends, prefix, layer, layer.recurrent, norms)
        if layer.attends and self._spec.latent is not None:
            self._record_latent(index, prefix, layer, norms, self._spec.latent)
        elif layer.attends:
            self._record_attention(index, prefix, layer, norms, kind)

    def _record_mixer(
        self, index: int, prefix: str, layer: LayerSpec, recurrent: RecurrentLayer, norms: NormNames
    ) -> ActivationKind:
        """Record a recurrent part. `index` is that of its states' cache. Return the format of its input."""
        spec, program = self._spec, self._program
        own_prefix = f"{prefix}mixer."
        mixer = NativeMixer(spec, recurrent, self._weights, own_prefix, self._shard)
        projection = [
            self._packed_rows([rows], mixer.has_projection_bias) for rows in mixer.projection
        ]
        output = self._output_projection(
            f"{own_prefix}out_proj.weight", mixer.num_columns, mixer.shares
        )
        bias = None
        if mixer.has_output_bias:
            bias = self._weights.vector(f"{own_prefix}out_proj.bias", spec.hidden_size)
        kind = self._record_projection(
            prefix,
            norms.attention_input,
            [weight for weights, _ in projection for weight in weights],
            [bias for _, biases in projection for bias in biases],
        )
        for columns, weight, first_column in mixer.second_products:
            self._record_second_product(columns, weight, first_column)
        state: dict[str, Any] = {"layer": index, "group": layer.state_group, "mixer": mixer}
        if isinstance(recurrent, ShortConvolution):
            program.add_op("short_convolution", activation_kind=output.activation_kind, **state)
        else:
            program.add_op("convolve", **state)
            program.add_op("scan", **state)
            if mixer.shares_norm:
                program.add_op("share_squares", mixer=mixer)
            program.add_op(
                "gate_mixed",
                activation_kind=output.activation_kind,
                target=_PART if mixer.shares_norm else _QKV,
                mixer=mixer,
                eps=mixer.norm_eps,
            )
        self._add_block(prefix, output, bias, norms.attention_output, spec.recurrent_multiplier)
        return kind

    def _record_projection(
        self,
        prefix: str,
        norm: str | None,
        parts: Sequence[PackedWeight],
        biases: Sequence[Floats | None],
        kind: ActivationKind | None = None,
    ) -> ActivationKind:
        """Record products of the normed residual stream, side by side. Return the format that they read last.

        Args:
            prefix: The prefix of the layer's tensors.
            norm: The name of the norm, or None.
            parts: The matrices.
            biases: Their biases.
            kind: The format in which the stream is already quantized, and must stay; None if it is not.
        """
        first_column, start = 0, 0
        while start < len(parts):
            stop = start + 1
            needed = parts[start].activation_kind.for_whole_rows
            while (
                stop < min(len(parts), start + MAX_PARTS)
                and parts[stop].activation_kind.for_whole_rows == needed
            ):
                stop += 1
            if kind != needed:
                kind = self._quantize(prefix, norm, needed)
            self._program.add_op(
                "linear",
                input_kind=kind,
                source=0,
                target=_QKV,
                parts=parts[start:stop],
                vectors=biases[start:stop],
                first_column=first_column,
            )
            first_column += sum(part.n for part in parts[start:stop])
            start = stop
        assert kind is not None
        return kind

    def _record_second_product(
        self,
        columns: range,
        weight: PackedWeight,
        first_column: int,
        norm: Floats | None = None,
        eps: float = 0.0,
    ) -> None:
        """Record the product of columns of the projection, after an optional norm, into others."""
        kind = weight.activation_kind.for_whole_rows
        self._program.add_op(
            "quantize_columns",
            activation_kind=kind,
            first_column=columns.start,
            num_columns=len(columns),
            vectors=[norm],
            eps=eps,
        )
        self._program.add_op(
            "linear",
            input_kind=kind,
            source=0,
            target=_QKV,
            first_column=first_column,
            parts=[weight],
            vectors=[None],
        )

    def _record_attention(
        self,
        index: int,
        prefix: str,
        layer: LayerSpec,
        norms: NormNames,
        input_kind: ActivationKind | None,
    ) -> None:
        """Record the attention of a layer.

        Args:
            index: The index of its KV cache.
            prefix: The prefix of the layer's tensors.
            layer: The layer.
            norms: The names of its norms.
            input_kind: The format in which its input is already quantized, or None.
        """
        spec, shard = self._spec, self._shard
        rows = qkv_rows(spec, layer, self._weights, f"{prefix}self_attn.", shard)
        qkv, biases = self._packed_rows(rows, spec.qkv_bias)
        output = self._attention_output(prefix, spec.head_dim)
        columns = len(shard.heads(spec)) // len(shard.kv_heads(spec)) * spec.head_dim
        if output.activation_kind == ActivationKind.INT8 and columns % GROUP_SIZE:
            raise NotSupportedNatively(
                f"{columns} query elements per key/value head are not a multiple of the group size "
                f"{GROUP_SIZE}"
            )
        if input_kind is not None and any(
            part.activation_kind.for_whole_rows != input_kind for part in qkv
        ):
            raise NotSupportedNatively(
                "the native CPU backend does not support attention beside a recurrent part whose "
                "weights have another format"
            )
        self._record_projection(prefix, norms.attention_input, qkv, biases, input_kind)
        qk_norm, head_norms = self._head_norms(prefix, layer)
        attention: dict[str, Any] = {
            "layer": index,
            "group": layer.kv_cache_group,
            "attention": AttentionLayer(
                spec.attention_scale, spec.attention_softcap or 0.0, _window_size(layer.window)
            ),
        }
        self._program.add_op(
            "rotate_store",
            rope=-1 if layer.rope is None else self._ropes[layer.rope],
            qk_norm=qk_norm,
            rotates_before_norm=spec.rotates_before_norm,
            vectors=[*head_norms, _scaling(layer.query_scaling)],
            **attention,
        )
        sinks = None
        if spec.has_sinks:
            name = f"{prefix}self_attn.sinks"
            sinks = self._weights.vector(name, spec.num_heads, shard.heads(spec)) * _LOG2_E
        gates = sum(len(heads) for heads in (shard.heads(spec), *[shard.kv_heads(spec)] * 2))
        self._program.add_op(
            "attention",
            activation_kind=output.activation_kind,
            vectors=[sinks],
            first_column=gates * spec.head_dim if spec.gates_attention else 0,
            **attention,
        )
        bias = None
        if spec.attention_output_bias:
            bias = self._weights.vector(f"{prefix}self_attn.o_proj.bias", spec.hidden_size)
        # The MLP of a parallel layer reads the stream as it was.
        target = _BLOCK if spec.is_parallel else None
        self._add_block(
            prefix,
            output,
            bias,
            norms.attention_output,
            spec.attention_multiplier,
            target=target,
        )

    def _record_latent(
        self, index: int, prefix: str, layer: LayerSpec, norms: NormNames, latent: LatentSpec
    ) -> None:
        """Record the latent attention of a layer. `index` is that of its KV cache."""
        spec, program, heads = self._spec, self._program, self._shard.heads(self._spec)
        name = f"{prefix}self_attn."
        first, keys = first_rows(spec, latent, name, heads)
        inputs, biases = self._packed_rows([keys, first], spec.qkv_bias)
        key_matrices, value_matrices = read_head_matrices(spec, latent, self._weights, name, heads)
        output = self._attention_output(prefix, latent.value_dim)
        unit = {ActivationKind.INT8: GROUP_SIZE, ActivationKind.BF16: 2}
        if latent.value_dim % unit.get(output.activation_kind, 1):
            raise NotSupportedNatively(
                f"{latent.value_dim} value elements per head are not a multiple of "
                f"{unit[output.activation_kind]}"
            )
        self._record_projection(prefix, norms.attention_input, inputs, biases)
        if latent.query_rank is not None:
            (queries,) = self._weights.packed_together(
                [query_rows(spec, latent, name, heads)], latent.query_rank
            )
            norm = self._weights.vector(f"{name}q_a_layernorm.weight", latent.query_rank)
            columns = range(spec.head_dim, spec.head_dim + latent.query_rank)
            self._record_second_product(columns, queries, spec.head_dim, norm, latent.norm_eps)
        program.add_op(
            "latent_queries",
            input_kind=key_matrices.activation_kind.for_whole_rows,
            heads=key_matrices,
        )
        attention: dict[str, Any] = {
            "layer": index,
            "group": layer.kv_cache_group,
            "attention": AttentionLayer(
                spec.attention_scale, spec.attention_softcap or 0.0, _window_size(layer.window)
            ),
        }
        norm = self._weights.vector(f"{name}kv_a_layernorm.weight", latent.kv_rank)
        program.add_op(
            "rotate_store",
            rope=-1 if layer.rope is None else self._ropes[layer.rope],
            vectors=[norm],
            eps=latent.norm_eps,
            **attention,
        )
        program.add_op("attention", activation_kind=ActivationKind.F32, vectors=[None], **attention)
        program.add_op(
            "latent_values",
            input_kind=value_matrices.activation_kind.for_whole_rows,
            activation_kind=output.activation_kind,
            heads=value_matrices,
        )
        bias = None
        if spec.attention_output_bias:
            bias = self._weights.vector(f"{name}o_proj.bias", spec.hidden_size)
        self._add_block(
            prefix, output, bias, norms.attention_output, spec.attention_multiplier, source=0
        )

    def _attention_output(self, prefix: str, head_size: int) -> PackedWeight:
        """Return this rank's part of the projection of all heads' outputs, of `head_size` elements each."""
        num_heads = self._spec.num_heads
        shares = [
            range(heads.start * head_size, heads.stop * head_size)
            for heads in self._shard.tensor_parallel.parts(num_heads)
        ]
        return self._output_projection(
            f"{prefix}self_attn.o_proj.weight", num_heads * head_size, shares
        )

    def _record_mlp(self, prefix: str, norms: NormNames) -> None:
        """Record the MLP of a layer."""
        spec = self._spec
        mlp = self._read_mlp(f"{prefix}mlp.", spec.intermediate_size)
        norm = norms.mlp_input
        if spec.is_parallel and norm is None:
            norm = norms.attention_input
        input_kind = self._quantize(prefix, norm, mlp.gate_up)
        xielu = self._xielu(f"{prefix}mlp.act_fn.") if spec.activation == "xielu" else None
        self._record_gated(mlp, input_kind, xielu)
        self._add_block(prefix, mlp.down, mlp.down_bias, norms.mlp_output, spec.mlp_multiplier)
        if spec.is_parallel:
            scale = spec.residual_multiplier * spec.attention_multiplier
            self._program.add_op("norm_add", vectors=[None], scale=scale)

    def _record_experts(
        self, index: int, prefix: str, experts: ExpertsSpec, norms: NormNames
    ) -> None:
        """Record the mixture of experts of a layer, the `index`-th of this shard."""
        spec, weights, program = self._spec, self._weights, self._program
        norm = norms.mlp_input
        vectors: list[Floats | None] = [None]
        if experts.has_router_bias:
            vectors = [weights.vector(f"{prefix}mlp.gate.bias", experts.num_experts)]
        name = f"{prefix}mlp.gate.weight"
        router = [weights.packed_float32(name, experts.num_experts, spec.hidden_size)]
        if experts.has_shared_gate:
            name = f"{prefix}mlp.shared_expert_gate.weight"
            router.append(weights.packed_float32(name, 1, spec.hidden_size))
            vectors.append(None)
        kind = self._quantize(prefix, norm, router)
        program.add_op(
            "linear", input_kind=kind, source=0, target=_ROUTER, parts=router, vectors=vectors
        )
        native = NativeExperts(spec, experts, weights, f"{prefix}mlp.", self._shard)
        program.add_op("route", experts=native)
        mixture: dict[str, Any] = {"experts": native, "layer": index}
        if experts.latent_size:
            return self._record_latent_experts(prefix, experts, norms, mixture)
        if native.input_kind != kind:
            kind = self._quantize(prefix, norm, native.input_kind)
        program.add_op(
            "gated_experts", input_kind=kind, activation_kind=native.output_kind, **mixture
        )
        program.add_op("expert_outputs", input_kind=native.output_kind, **mixture)
        if experts.shared_intermediate_size:
            mlp = self._read_mlp(f"{prefix}mlp.shared_experts.", experts.shared_intermediate_size)
            if mlp.gate_up[0].activation_kind.for_whole_rows != kind:
                kind = self._quantize(prefix, norm, mlp.gate_up)
            self._record_gated(mlp, kind)
            # The ranks' parts of the whole mixture are summed. One of them adds this bias.
            is_first = self._shard.tensor_parallel.rank == 0
            self._program.add_op(
                "linear",
                input_kind=mlp.down.activation_kind,
                source=1,
                target=_BLOCK,
                parts=[mlp.down],
                vectors=[mlp.down_bias if is_first else None],
            )
        output_norm = norms.mlp_output
        program.add_op(
            "combine_experts",
            target=self._block_target(output_norm),
            scale=spec.residual_multiplier,
            **mixture,
        )
        self._finish_block(prefix, None, output_norm, spec.residual_multiplier)

    def _record_latent_experts(
        self, prefix: str, experts: ExpertsSpec, norms: NormNames, mixture: dict[str, Any]
    ) -> None:
        """Record experts that read a projection of the hidden states, after their choice.

        Every rank has the matrices before and after the experts. The first product is in the place of a layer's
        projection, and so is the sum of the experts' outputs.
        """
        spec, program, native = self._spec, self._program, mixture["experts"]
        if norms.mlp_output is not None or experts.has_shared_gate:
            raise NotSupportedNatively(
                "the native CPU backend does not support norms or gates after projected experts"
            )
        size, scale = experts.latent_size, spec.residual_multiplier
        to_latent, from_latent = (
            self._weights.packed(f"{prefix}mlp.{name}.weight", rows, columns)
            for name, rows, columns in (
                ("to_latent", size, spec.hidden_size),
                ("from_latent", spec.hidden_size, size),
            )
        )
        biases: list[Floats | None] = [None, None]
        if spec.mlp_bias:
            biases = [
                self._weights.vector(f"{prefix}mlp.{name}.bias", matrix.n)
                for name, matrix in (("to_latent", to_latent), ("from_latent", from_latent))
            ]
        self._record_projection(prefix, norms.mlp_input, [to_latent], biases[:1])
        columns: dict[str, Any] = {"first_column": 0, "num_columns": size, "vectors": [None]}
        program.add_op("quantize_columns", activation_kind=native.input_kind, **columns)
        program.add_op(
            "gated_experts",
            input_kind=native.input_kind,
            activation_kind=native.output_kind,
            **mixture,
        )
        program.add_op("expert_outputs", input_kind=native.output_kind, **mixture)
        program.add_op("combine_experts", target=_QKV if self._is_alone else _PART, **mixture)
        if not self._is_alone:
            self._sum(_QKV, size=size)
        if experts.shared_intermediate_size:
            mlp = self._read_mlp(f"{prefix}mlp.shared_experts.", experts.shared_intermediate_size)
            self._record_gated(mlp, self._quantize(prefix, norms.mlp_input, mlp.gate_up))
            self._add_block(prefix, mlp.down, mlp.down_bias, None, 1.0, target=_BLOCK)
        kind = from_latent.activation_kind.for_whole_rows
        program.add_op("quantize_columns", activation_kind=kind, **columns)
        program.add_op(
            "linear",
            input_kind=kind,
            source=0,
            target=_RESIDUAL,
            parts=[from_latent],
            vectors=biases[1:],
            scale=scale,
        )
        if experts.shared_intermediate_size:
            program.add_op("norm_add", vectors=[None], scale=scale)

    def _read_mlp(self, prefix: str, size: int) -> _MLP:
        """Return this rank's part of an MLP of `size` intermediate elements."""
        spec = self._spec
        shares = intermediate_shares(size, self._shard.tensor_parallel)
        names = ["gate_proj", "up_proj"] if spec.has_gate else ["up_proj"]
        gate_up, biases = self._projections(
            prefix,
            names,
            [size] * len(names),
            [shares[self._shard.tensor_parallel.rank]] * len(names),
            spec.mlp_bias,
        )
        down = self._output_projection(f"{prefix}down_proj.weight", size, shares)
        bias = None
        if spec.mlp_bias:
            bias = self._weights.vector(f"{prefix}down_proj.bias", spec.hidden_size)
        return _MLP(gate_up, biases, down, bias)

    def _record_gated(
        self, mlp: _MLP, input_kind: ActivationKind, xielu: Floats | None = None
    ) -> None:
        """Record the intermediate elements of an MLP. `xielu` has the numbers of that activation."""
        self._program.add_op(
            "gated_linear",
            input_kind=input_kind,
            activation_kind=mlp.down.activation_kind,
            parts=mlp.gate_up,
            vectors=[*mlp.biases, *[None] * (2 - len(mlp.biases)), xielu],
            scale=self._spec.gate_multiplier,
        )

    def _quantize(
        self, prefix: str, norm: str | None, inputs: list[PackedWeight] | ActivationKind
    ) -> ActivationKind:
        """Record the quantization of the residual stream, after an optional norm, for `inputs`. Return the format."""
        kind = (
            inputs
            if isinstance(inputs, ActivationKind)
            else inputs[0].activation_kind.for_whole_rows
        )
        vectors = [None] if norm is None else self._hidden_norm(f"{prefix}{norm}")
        self._program.add_op("quantize", activation_kind=kind, vectors=vectors)
        return kind

    def _add_block(
        self,
        prefix: str,
        output: PackedWeight,
        bias: Floats | None,
        norm: str | None,
        multiplier: float,
        source: int = 1,
        target: int | None = None,
    ) -> None:
        """Record the addition of a block's output projection, after an optional norm, to the residual stream.

        `source` has the activations that the projection reads. With `target` the output is written there instead.
        """
        # A norm cancels the multiplier, except for its epsilon. No family has both.
        assert norm is None or multiplier == 1.0
        scale = self._spec.residual_multiplier * multiplier
        self._program.add_op(
            "linear",
            input_kind=output.activation_kind,
            source=source,
            target=self._block_target(norm, target),
            parts=[output],
            vectors=[bias if self._is_alone else None],
            scale=scale,
        )
        self._finish_block(prefix, bias, norm, scale, target)

    def _block_target(self, norm: str | None, target: int | None = None) -> int:
        """Return where the last product of a block is written, if `norm` follows it."""
        return self._sum_target(norm, target) if self._is_alone else _PART

    def _sum_target(self, norm: str | None, target: int | None) -> int:
        if target is not None:
            return target
        return _RESIDUAL if norm is None or self._spec.norms_stream else _BLOCK

    def _sum(
        self, target: int, bias: Floats | None = None, scale: float = 1.0, size: int | None = None
    ) -> None:
        """Record the sum of the ranks' parts of `size` elements, by default as many as hidden states have."""
        self._program.add_op(
            "sum",
            target=target,
            vectors=[bias],
            scale=scale,
            num_columns=self._spec.hidden_size if size is None else size,
        )

    def _finish_block(
        self,
        prefix: str,
        bias: Floats | None,
        norm: str | None,
        scale: float,
        target: int | None = None,
    ) -> None:
        """Record the sum over the ranks, if there are several, and the optional norm after a block."""
        if not self._is_alone:
            target = self._sum_target(norm, target)
            self._sum(target, bias, scale)
        if norm is not None:
            vectors = self._hidden_norm(f"{prefix}{norm}")
            if self._spec.norms_stream:
                self._program.add_op("norm", vectors=vectors)
            else:
                self._program.add_op("norm_add", vectors=vectors, scale=scale)

    def _head_norms(self, prefix: str, layer: LayerSpec) -> tuple[int, list[Floats | None]]:
        """Return the kind of the norms of queries and keys, and their two vectors."""
        spec, prefix = self._spec, f"{prefix}self_attn."
        if spec.qk_norm is None or (spec.qk_norm == "unit" and layer.rope is None):
            return _NO_NORM, [None, None]
        if spec.qk_norm == "full":
            if not self._is_alone:
                raise NotSupportedNatively(
                    "the native CPU backend does not support norms across all heads with "
                    "--tensor-parallel-size"
                )
            sizes = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim)
            names = ("q_norm", "k_norm")
            norms = [self._norm(f"{prefix}{name}", n) for name, n in zip(names, sizes, strict=True)]
            return _FULL_NORM, [*norms]
        if spec.qk_norm == "head" and spec.norm_kind == "rms" and spec.rope_order == "half":
            return _HEAD_NORM, [
                self._norm(f"{prefix}{name}", spec.head_dim) for name in ("q_norm", "k_norm")
            ]
        norm = head_norm(spec, layer, self._weights, prefix, self._shard)
        bias_HK = norm.bias_HK if isinstance(norm, HeadLayerNorm) else None
        return _EACH_HEAD_NORM, [
            None if x_HK is None else np.ascontiguousarray(x_HK.float().numpy())
            for x_HK in (norm.weight_HK, bias_HK)
        ]

    def _embedding(self) -> PackedWeight:
        """Return the embedding, with rows for the second token type behind those of the first if it has any."""
        spec, weights = self._spec, self._weights
        size = spec.hidden_size
        if not spec.tells_segments:
            part = self._part(spec.vocab_size)
            return weights.packed("embed_tokens.weight", spec.vocab_size, size, part)
        first = weights.read("embed_tokens.weight", spec.vocab_size, size)
        types = weights.read("embed_token_types.weight", spec.num_token_types, size)
        second = first + (types[1] - types[0])
        return weights.pack_float_tensor("embed_tokens.weight", torch.cat((first, second)))

    def _position_embeddings(self) -> list[PackedWeight]:
        """Return the tables that the embeddings of a token's position and type are in, as far as there are any."""
        spec = self._spec
        if not spec.num_positions:
            return []
        check_num_positions(spec, self._max_model_len)
        rows = spec.num_positions + spec.position_offset
        part = range(spec.position_offset, rows)
        tables = [
            self._weights.packed_float("embed_positions.weight", rows, spec.hidden_size, part)
        ]
        if spec.num_token_types:
            types = range(spec.num_token_types)
            tables.append(
                self._weights.packed_float(
                    "embed_token_types.weight", len(types), spec.hidden_size, types
                )
            )
        return tables

    def _xielu(self, prefix: str) -> Floats:
        """Return the numbers of `Xielu` in csrc/rows/kernels.h."""
        xielu = read_xielu(self._weights, prefix)
        return np.array(
            [xielu.alpha_p.item(), xielu.alpha_n.item(), xielu.beta.item(), xielu.eps.item()],
            np.float32,
        )

    def _hidden_norm(self, name: str) -> list[Floats | None]:
        """Return the weight and the bias of a norm over the hidden size."""
        spec = self._spec
        bias_D = None
        if spec.norm_kind == "layer" and spec.norm_bias:
            bias_D = self._weights.vector(f"{name}.bias", spec.hidden_size)
        return [self._norm(name, spec.hidden_size), bias_D]

    def _norm(self, name: str, size: int) -> Floats:
        if not self._spec.has_norm_weights:
            return np.ones(size, np.float32)
        return self._weights.vector(f"{name}.weight", size) + np.float32(
            self._spec.norm_weight_offset
        )

    def _part(self, count: int) -> range:
        return self._shard.tensor_parallel.part(count)

    def _output_projection(self, name: str, inputs: int, shares: list[range]) -> PackedWeight:
        """Return the matrix that ends a block. Each rank has a share of its inputs."""
        rank = self._shard.tensor_parallel.rank
        return self._weights.packed_columns(name, self._spec.hidden_size, inputs, shares, rank)

    def _projections(
        self, prefix: str, names: list[str], sizes: list[int], parts: list[range], has_bias: bool
    ) -> tuple[list[PackedWeight], list[Floats | None]]:
        """Return this rank's parts of matrices that read the residual stream, and of their biases."""
        return self._packed_rows(self._weights.rows(prefix, names, sizes, parts), has_bias)

    def _packed_rows(
        self, rows: list[Rows], has_bias: bool
    ) -> tuple[list[PackedWeight], list[Floats | None]]:
        reader = self._weights
        weights = reader.packed_together(rows, self._spec.hidden_size)
        biases: list[Floats | None] = [None] * len(rows)
        if has_bias:
            biases = [
                each.select(reader.read_vector(f"{each.name}.bias", each.total, each.part)).numpy()
                for each in rows
            ]
        return weights, biases


def _window_size(window: Window | None) -> int:
    """Return the window as native attention takes it: chunks are negative."""
    if isinstance(window, Chunk):
        return -window.size
    return window or 0


def _scaling(scaling: QueryScaling | None) -> Floats | None:
    """Return `QueryScaling` in csrc/program/model.h."""
    if scaling is None:
        return None
    return np.array([scaling.beta, scaling.length, scaling.offset], np.float32)
