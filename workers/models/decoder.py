"""The decoder for all model families; `ModelSpec` describes their differences and `ModelShard` the local part.

Shapes: T tokens of a step, S of them sampled, D hidden size, H query heads and G key/value heads of this shard,
K head dimension, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...protocol.arrays import Int32Array
from ..attention import AttentionBackend, AttentionLayer
from ..batch import PersistentBatch
from ..layers.layers import HeadNorm, LayerKernels, Linear, RMSNorm
from ..layers.rope import RotaryEmbedding, RotaryTables
from ..layers.spec import LayerSpec, ModelSpec
from ..loaders.checkpoint import Checkpoint
from ..parallel.parallel_layers import RowParallelLinear, VocabParallelEmbedding, VocabParallelHead
from ..parallel.shard import ModelShard
from ..sampling import SamplerOutput, TorchSampler
from .weights import ProgressCallback, WeightReader, rows_of, weight_reader


class Decoder:
    """The model of `spec`, or a shard of it, with its weights on one device.

    Args:
        attention: Attention with the heads of the shard.
        max_model_len: The longest sequence that will be served; some rotary embeddings depend on it.

    Raises:
        CheckpointError: A tensor is missing, has another shape than the spec says, or does not belong to the model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        attention: AttentionBackend,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        shard: ModelShard | None = None,
        kernels: LayerKernels | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        kernels = kernels or LayerKernels()
        self.spec = spec
        self.attention = attention
        self.shard = shard = shard or ModelShard.whole(spec)
        self.hidden_dtype = dtype
        self.kernels = kernels
        weights = weight_reader(
            checkpoint,
            dtype,
            device,
            has_head=not spec.tie_word_embeddings,
            can_keep=kernels.can_keep if kernels.keeps_quantized else None,
            shard=shard,
            on_progress=on_progress,
        )
        tensor_parallel = shard.tensor_parallel
        vocabulary = (spec.vocab_size, spec.hidden_size)
        part = tensor_parallel.part(spec.vocab_size)
        if shard.is_first or (shard.is_last and spec.tie_word_embeddings):
            embedding_vD = weights.read("embed_tokens.weight", *vocabulary, part=part)
        if shard.is_first:
            self._embed = VocabParallelEmbedding(embedding_vD, spec.vocab_size, tensor_parallel)
        self._embedding_scale = spec.rounded_embedding_scale(dtype)
        layers = spec.layers[shard.layers.start : shard.layers.stop]
        self._layers = [
            DecoderLayer(spec, layer, weights, f"layers.{i}.", attention, shard, kernels)
            for i, layer in zip(shard.layers, layers, strict=True)
        ]
        if shard.is_last:
            self._norm = kernels.norm(
                weights.read_vector("norm.weight", spec.hidden_size) + spec.norm_weight_offset,
                spec.norm_eps,
            )
            self._head = VocabParallelHead(
                embedding_vD if spec.tie_word_embeddings else weights.read_head(*vocabulary, part),
                spec,
                tensor_parallel,
                kernels,
            )
        weights.finish()
        self._ropes = {
            rope: RotaryEmbedding(rope, max_model_len=max_model_len, dtype=dtype, device=device)
            for rope in {layer.rope for layer in layers if layer.rope is not None}
        }

    @torch.inference_mode()
    def forward(
        self,
        inputs: Tensor,
        positions_T: Tensor,
        kv_caches: Sequence[Tensor],
        attn_metadata: Sequence[Any],
    ) -> Tensor:
        """Fill the KV caches and return the hidden states [T, D] in `hidden_dtype`; those of the last stage are normed.

        Args:
            inputs: Token ids [T] for the first stage, else hidden states [T, D] of the previous stage, which are
                overwritten.
            positions_T: Integer positions.
            kv_caches: One tensor for each layer of the shard.
            attn_metadata: The attention backend's metadata for each KV-cache group.
        """
        x_TD = inputs
        if self.shard.is_first:
            x_TD = self._embed(inputs)
            if self._embedding_scale != 1.0:
                x_TD *= self._embedding_scale
        tables = {
            rope: self.kernels.rotary_tables(embedding, positions_T)
            for rope, embedding in self._ropes.items()
        }
        block_TD = None
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            block_TD = layer.forward(
                x_TD,
                block_TD,
                None if layer.rope is None else tables[layer.rope],
                kv_cache,
                attn_metadata[layer.kv_cache_group],
            )
        return added(x_TD, block_TD, self.spec, self._norm if self.shard.is_last else None)

    @torch.inference_mode()
    def compute_logits(self, hidden_SD: Tensor) -> Tensor:
        """Return the logits [S, V] in float32."""
        return self._head.logits(hidden_SD)

    def make_sampler(self, batch: PersistentBatch) -> TorchSampler:
        """Return the sampler for the requests of `batch`, which `forward_and_sample` uses from then on."""
        self._sampler = TorchSampler(
            batch.num_slots, self.spec.vocab_size, batch.device, self.kernels.choose_tokens
        )
        self._batch = batch
        return self._sampler

    def forward_and_sample(
        self,
        inputs: Tensor,
        positions_T: Tensor,
        kv_caches: Sequence[Tensor],
        attn_metadata: Sequence[Any],
        rows_S: Int32Array,
        slots_S: Int32Array,
    ) -> SamplerOutput:
        """Run `forward`, and sample from the logits of its rows `rows_S`."""
        hidden_TD = self.forward(inputs, positions_T, kv_caches, attn_metadata)
        hidden_SD = hidden_TD[torch.from_numpy(rows_S).to(hidden_TD.device)]
        logits_SV = self.compute_logits(hidden_SD)
        return self._sampler.sample(logits_SV, slots_S, self._batch.num_tokens[slots_S])


def added(x_TD: Tensor, block_TD: Tensor | None, spec: ModelSpec, norm: RMSNorm | None) -> Any:
    """Add a block's output to the residual stream in place, and return the stream, normed if there is a norm."""
    if block_TD is None:
        return x_TD if norm is None else norm(x_TD)
    if norm is None:
        return x_TD.add_(block_TD, alpha=spec.residual_multiplier)
    return norm.add_and_norm(x_TD, block_TD, spec.residual_multiplier)


class DecoderLayer:
    """Attention and MLP, each between its norms, on the residual stream."""

    def __init__(
        self,
        spec: ModelSpec,
        layer: LayerSpec,
        weights: WeightReader,
        prefix: str,
        attention: AttentionBackend,
        shard: ModelShard,
        kernels: LayerKernels,
    ) -> None:
        def norm(name: str | None, consumer: Linear | None = None) -> RMSNorm | None:
            if name is None:
                return None
            weight_D = weights.read_vector(f"{prefix}{name}.weight", spec.hidden_size)
            return kernels.norm(weight_D + spec.norm_weight_offset, spec.norm_eps, consumer)

        self.rope = layer.rope
        self.kv_cache_group = layer.kv_cache_group
        self._spec = spec
        self._attention = Attention(
            spec, layer, weights, f"{prefix}self_attn.", attention, shard, kernels
        )
        self._attention_input_norm = norm(spec.norms.attention_input, self._attention.qkv)
        self._attention_output_norm = norm(spec.norms.attention_output)
        self._mlp = MLP(spec, weights, f"{prefix}mlp.", shard, kernels)
        self._mlp_input_norm = norm(spec.norms.mlp_input, self._mlp.gate_up)
        self._mlp_output_norm = norm(spec.norms.mlp_output)

    def forward(
        self,
        x_TD: Tensor,
        block_TD: Tensor | None,
        tables: RotaryTables | None,
        kv_cache: Tensor,
        attn_metadata: Any,
    ) -> Tensor:
        """Add the previous block's output to the stream `x_TD`, and return the MLP's output to be added next."""
        x = added(x_TD, block_TD, self._spec, self._attention_input_norm)
        block_TD = self._attention.forward(x, tables, kv_cache, attn_metadata)
        if self._attention_output_norm is not None:
            block_TD = self._attention_output_norm(block_TD)
        block_TD = self._mlp.forward(added(x_TD, block_TD, self._spec, self._mlp_input_norm))
        return block_TD if self._mlp_output_norm is None else self._mlp_output_norm(block_TD)


class Attention:
    """Fused query, key and value projection, norms, rotation, attention, output projection."""

    def __init__(
        self,
        spec: ModelSpec,
        layer: LayerSpec,
        weights: WeightReader,
        prefix: str,
        backend: AttentionBackend,
        shard: ModelShard,
        kernels: LayerKernels,
    ) -> None:
        self._backend = backend
        self._head_dim = spec.head_dim
        heads, kv_heads = shard.heads(spec), shard.kv_heads(spec)
        kv_scales = None
        if backend.dtype == torch.float8_e4m3fn:
            kv_scales = weights.read_kv_scales(prefix, spec.num_kv_heads, kv_heads)
        self._layer = AttentionLayer(
            spec.attention_scale, layer.window, spec.attention_softcap, kv_scales
        )
        self._num_heads, self._num_kv_heads = len(heads), len(kv_heads)
        query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        queries, keys = self._elements(heads), self._elements(kv_heads)
        rows = rows_of(
            ["qkv_proj"] if spec.fused_projections else ["q_proj", "k_proj", "v_proj"],
            [query_size, kv_size, kv_size],
            [queries, keys, keys],
        )
        self.qkv = kernels.linear(
            weights.read_matrix_rows(prefix, rows, spec.hidden_size),
            weights.read_rows(prefix, "bias", rows) if spec.qkv_bias else None,
        )
        self._output = RowParallelLinear(
            weights.read_matrix(
                f"{prefix}o_proj.weight", spec.hidden_size, query_size, part=queries, dim=1
            ),
            weights.read(f"{prefix}o_proj.bias", spec.hidden_size)
            if spec.attention_output_bias
            else None,
            shard.tensor_parallel,
            kernels,
        )
        self._head_norm: HeadNorm | None = None
        self._full_norm: FullNorm | None = None
        if spec.qk_norm == "head":
            self._head_norm = _head_norm(spec, weights, prefix, shard)
        elif spec.qk_norm == "full":
            self._full_norm = FullNorm(spec, weights, prefix, shard)

    def _elements(self, heads: range) -> range:
        return range(heads.start * self._head_dim, heads.stop * self._head_dim)

    def forward(
        self, x: Any, tables: RotaryTables | None, kv_cache: Tensor, attn_metadata: Any
    ) -> Tensor:
        """Return the attention output [T, D] of a layer."""
        num_heads, num_kv_heads = self._num_heads, self._num_kv_heads
        qkv_THK = self.qkv(x).unflatten(-1, (-1, self._head_dim))
        qk_THK, v_TGK = qkv_THK.split((num_heads + num_kv_heads, num_kv_heads), 1)
        if self._full_norm is not None:
            qk_THK = self._full_norm(qk_THK)
        attended_THK = self._backend.forward_projected(
            qk_THK, v_TGK, self._head_norm, tables, kv_cache, attn_metadata, self._layer
        )
        return self._output(attended_THK.flatten(1))


def _head_norm(spec: ModelSpec, weights: WeightReader, prefix: str, shard: ModelShard) -> HeadNorm:
    """Return a norm over every query head and every key head."""
    q_K, k_K = (
        weights.read_vector(f"{prefix}{name}.weight", spec.head_dim) + spec.norm_weight_offset
        for name in ("q_norm", "k_norm")
    )
    weight_HK = torch.cat(
        (q_K.expand(len(shard.heads(spec)), -1), k_K.expand(len(shard.kv_heads(spec)), -1))
    )
    return HeadNorm(weight_HK, spec.norm_eps)


class FullNorm:
    """Norms over all query heads together and over all key heads together, across ranks."""

    def __init__(
        self, spec: ModelSpec, weights: WeightReader, prefix: str, shard: ModelShard
    ) -> None:
        self._shard = shard
        self._spec = spec
        self._num_heads = (len(shard.heads(spec)), len(shard.kv_heads(spec)))
        self._q_norm, self._k_norm = (
            RMSNorm(
                weights.read_vector(f"{prefix}{name}.weight", heads * spec.head_dim)
                + spec.norm_weight_offset,
                spec.norm_eps,
            )
            for name, heads in (("q_norm", spec.num_heads), ("k_norm", spec.num_kv_heads))
        )

    def __call__(self, qk_THK: Tensor) -> Tensor:
        """Return the normed queries and keys of this rank, [T, H + G, K]."""
        q_THK, k_TGK = qk_THK.split(self._num_heads, 1)
        q_THK = self._norm(self._q_norm, q_THK, self._spec.num_heads)
        k_TGK = self._norm(self._k_norm, k_TGK, self._spec.num_kv_heads)
        return torch.cat((q_THK, k_TGK), 1)

    def _norm(self, norm: RMSNorm, x_THK: Tensor, num_heads: int) -> Tensor:
        """Norm all heads of the model, and return this rank's."""
        tensor_parallel = self._shard.tensor_parallel
        # If several ranks have the same heads, the heads of one of them are enough.
        step = max(1, tensor_parallel.size // num_heads)
        all_THK = torch.cat(tuple(tensor_parallel.stack(x_THK)[::step]), 1)
        own = tensor_parallel.part(num_heads)
        return norm(all_THK.flatten(1)).view_as(all_THK)[:, own.start : own.stop]


class MLP:
    """Gated feed-forward block."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightReader,
        prefix: str,
        shard: ModelShard,
        kernels: LayerKernels,
    ) -> None:
        hidden, intermediate = spec.hidden_size, spec.intermediate_size
        part = shard.tensor_parallel.part(intermediate)
        rows = rows_of(
            ["gate_up_proj"] if spec.fused_projections else ["gate_proj", "up_proj"],
            [intermediate] * 2,
            [part] * 2,
        )
        self.gate_up = kernels.linear(
            weights.read_matrix_rows(prefix, rows, hidden),
            weights.read_rows(prefix, "bias", rows) if spec.mlp_bias else None,
        )
        self._down = RowParallelLinear(
            weights.read_matrix(
                f"{prefix}down_proj.weight", hidden, intermediate, part=part, dim=1
            ),
            weights.read(f"{prefix}down_proj.bias", hidden) if spec.mlp_bias else None,
            shard.tensor_parallel,
            kernels,
        )
        self._gated_activation = kernels.gated_activation(spec.activation, self._down)

    def forward(self, x: Any) -> Tensor:
        """Return the MLP's output [T, D]."""
        return self._down(self._gated_activation(self.gate_up(x)))
