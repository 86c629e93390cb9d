"""The decoder for all model families. `ModelSpec` describes how they differ, and `ModelShard` which part is local.

Shapes: T tokens of a step, S of them sampled, D hidden size, H query heads and G key/value heads of this shard, K head
dimension, V vocabulary, P positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...protocol.arrays import Int32Array
from ...protocol.checkpoint.recurrent_layers import (
    HeadConvolutions,
    InnerConvolutions,
    Rwkv6,
    Rwkv7,
)
from ...protocol.checkpoint.state_spaces.rwkv4 import Rwkv4
from ..attention import DeviceAttention, as_backend
from ..layers.layer_spec import LayerSpec
from ..layers.layers import LayerKernels
from ..layers.parallel.shard import ModelShard
from ..layers.rope import INDEX_AXIS, RopeSpec, RotaryEmbedding, RotaryTables
from ..layers.spec import ModelSpec
from ..layers.specs.experts import passed_size
from ..loaders.checkpoint import Checkpoint
from .cross_attention import QueryRecorder
from .decoder_layer import DecoderLayer
from .experts.banks import share_experts
from .experts.router_mlp import RouterState
from .layer_kinds.altup import AltUpLayer, Streams
from .layer_kinds.attention_residuals import AttentionResidualLayer, ConvolvedResidualLayer
from .layer_kinds.block_convolution import BlockConvolvedLayer
from .layer_kinds.bottleneck import BottleneckLayer
from .layer_kinds.convolved import ConvolvedLayer, MixedHeadsLayer
from .layer_kinds.hyper_connections import (
    HyperLayer,
    Reducer,
    StreamMean,
    read_reducer,
    share_factors,
)
from .layer_kinds.image_reader import ImageReaderLayer
from .layer_kinds.input_convolution import InputConvolutionLayer
from .layer_kinds.memory_gate import MemoryGateLayer
from .layer_kinds.neighbors import NeighborsLayer
from .layer_kinds.normed_stream import NormedStreamLayer
from .layer_kinds.parallel import ParallelLayer
from .layer_kinds.predicted_stream import PredictedStream, PredictedStreamLayer
from .layer_kinds.stream_attention import StreamAttention
from .layer_kinds.token_shift import TokenShiftLayer, share_values
from .layer_source import LayerSource
from .layer_step import LayerStep
from .lora.adapters import LoraAdapters
from .norms import added, read_norm
from .positions.fourier import FourierSums
from .score_head import ScoreHead
from .shared_blocks.block import Block
from .shared_blocks.layer import SharedBlockLayer
from .shared_blocks.restarts import Restarts
from .stage.embedding import TokenEmbedding, read_embedding
from .stage.head import OutputHead
from .stage.kept_inputs import KeptInputs
from .stage.layer_inputs import read_layer_inputs
from .stage.passed_state import PassedState
from .stage.self_conditioning import SelfConditioning
from .torch_decoder import TorchDecoder
from .weights import ProgressCallback, weight_reader

AnyLayer: TypeAlias = AltUpLayer | DecoderLayer | PredictedStreamLayer | SharedBlockLayer


class Decoder(TorchDecoder):
    """The model described by `spec`, or a shard of it, with its weights on one device.

    Args:
        attention: An attention backend with the heads of the shard.
        max_model_len: The length of the longest sequence that will be served; some rotary embeddings depend on it.
        loras: The LoRA adapters that requests may use.
        kept_layers: The layers whose inputs are kept in `kept_hidden_TE`; the number of layers means the final norm's
            input.

    Raises:
        CheckpointError: A tensor is missing, has another shape than the spec says, or does not belong to the model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        attention: DeviceAttention,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        shard: ModelShard | None = None,
        kernels: LayerKernels | None = None,
        on_progress: ProgressCallback | None = None,
        loras: LoraAdapters | None = None,
        kept_layers: Sequence[int] | None = None,
    ) -> None:
        kernels = kernels or LayerKernels()
        shard = shard or ModelShard.whole(spec)
        super().__init__(spec, attention, shard, dtype, kernels)
        self._kept = KeptInputs(spec, shard, kept_layers)
        self.kept_width, self.received_width = self._kept.kept_width, self._kept.received_width
        weights = weight_reader(
            checkpoint,
            dtype,
            device,
            has_head=spec.has_head and not spec.tie_word_embeddings,
            has_embedding=spec.has_embedding,
            tensor_names=spec.tensor_names,
            row_factors=spec.row_factors,
            is_transposed=spec.has_transposed_matrices,
            can_keep=kernels.can_keep if kernels.keeps_quantized else None,
            shard=shard,
            on_progress=on_progress,
        )
        self.loras = weights.loras = loras
        if loras is not None:
            loras.prepare(spec, shard, weights.checkpoint, kernels, dtype)
        source = LayerSource(spec, weights, "", shard, kernels)
        is_tied = shard.is_last and spec.has_head and spec.tie_word_embeddings
        embeds = shard.is_first and spec.has_embedding
        embedding_vD = read_embedding(source) if embeds or is_tied else None
        self._embedding: TokenEmbedding | None = None
        if embeds and embedding_vD is not None:
            self._embedding = TokenEmbedding(source, embedding_vD, loras, max_model_len)
        self._conditioning = SelfConditioning(source) if spec.self_conditioning_size else None
        self._layer_inputs = read_layer_inputs(source)
        layers = spec.layers[shard.layers.start : shard.layers.stop]
        self._width = spec.stage_width(len(spec.layers))
        self._next_width = spec.stage_width(shard.layers.stop)
        self._passed_width = spec.passed_width(shard.layers.start)
        has_passes = any(layer.restart is not None for layer in spec.layers)
        self._restarts = Restarts(spec, weights) if has_passes else None
        self._layers = _make_layers(source, attention)
        for previous, current in pairwise(self._layers):
            if isinstance(previous, DecoderLayer) and isinstance(current, DecoderLayer):
                current.previous = previous if previous.shortcut is not None else None
        self._passed: PassedState | None = None
        if passed_size(layer.experts for layer in spec.layers):
            self._passed = self._share_router_state()
        if spec.shares_values:
            self._passed = share_values(self._layers)
        self._last_streams: PredictedStream | Streams | Reducer | StreamAttention | None = None
        if spec.hyper_connections is not None and spec.hyper_connections.delayed:
            self._passed = self._last_streams = share_factors(spec.hyper_connections, self._layers)
        elif spec.hyper_connections is not None and shard.is_last:
            self._last_streams = read_reducer(spec.hyper_connections, source.at("head_hc"))
        if shard.is_last:
            if (residuals := spec.attention_residuals) is not None:
                last = source.at("head_res.")
                self._last_streams = StreamAttention(residuals, last, 1 + residuals.num_sums)
            if spec.predicted_stream is not None:
                self._last_streams = PredictedStream()
            if spec.altup is not None:
                self._last_streams = Streams(
                    spec, spec.altup, weights, "altup_unembed_projections", kernels
                )
            self._norm = read_norm(spec, weights, "norm", kernels) if spec.has_final_norm else None
            self.score_head = ScoreHead.read(spec, weights, loras)
            if spec.has_head:
                self._head = OutputHead(source, embedding_vD if is_tied else None, loras)
        self._ropes = {
            rope: RotaryEmbedding(
                rope,
                max_model_len=max_model_len,
                dtype=dtype,
                device=device,
                log_factors=weights.read_vector("rotary_emb.alpha", rope.rotary_dim // 2)
                if rope.has_factors
                else None,
                mix=FourierSums(spec, rope, shard, weights, kernels) if rope.fourier else None,
            )
            for rope in {layer.rope for layer in layers if layer.rope is not None}
        }
        weights.finish()

    @torch.inference_mode()
    def forward(
        self,
        inputs: Tensor,
        positions_T: Tensor,
        kv_caches: Sequence[Tensor],
        attn_metadata: Sequence[Any],
    ) -> Tensor:
        """Fill the KV caches, and return the hidden states [T, D] in `hidden_dtype`, normed on the last stage.

        Between stages, hidden states include all streams and the inputs of later layers, [T, `received_width`].

        Args:
            inputs: Token ids [T] for the first stage, else hidden states [T, D] of the previous stage, which are
                overwritten.
            positions_T: Integer positions.
            kv_caches: One tensor per KV-cache group that a layer of the shard reads, in the order of the layers.
            attn_metadata: For each KV-cache group, the attention backend's metadata or the `StateBatch`.
        """
        if self.shard.expert_group is not None:
            self.shard.expert_group.begin_round(self.join_round)
        inputs, kept = self._kept.split(inputs)
        x_TD, layer_inputs = self._begin(inputs, positions_T)
        tables = self._rotary_tables(positions_T)
        if self.spec.source is not None:
            for layer in self._layers:
                if layer.cross is not None:
                    layer.cross.reads_T1 = self.reads_T1
        is_canvas_T1 = None if self.canvases is None else self.canvases.mask(len(x_TD))
        block_TD, caches = None, iter(kv_caches)
        num_own = len(self._layers)
        own, rest = layer_inputs[:num_own], layer_inputs[num_own:]
        added_after = () if self.placed is None else self.spec.added_after
        for index, (layer, inputs_TP) in enumerate(
            zip_longest(self._layers, own), self.shard.layers.start
        ):
            described = self.spec.layers[index]
            if self._restarts is not None and described.restart is not None:
                x_TD = added(x_TD, block_TD, self.spec, None)
                x_TD, block_TD = self._restarts.apply(x_TD, described.restart), None
            if index in self._kept.layers:
                kept[index] = self._layer_input(index, x_TD, block_TD)
            block_TD = layer.forward(
                x_TD,
                block_TD,
                LayerStep(
                    positions_T,
                    None if layer.rope is None else tables[layer.rope],
                    [(next(caches), attn_metadata[group]) for group in described.cache_groups],
                    inputs_TP,
                    described.weights is not None,
                    is_canvas_T1,
                    self.places_T1,
                ),
            )
            if index in added_after:
                assert self.placed is not None
                self.placed.add_to(x_TD, added_after.index(index))
        if not self.shard.is_last:
            sent_TE = self._sent(added(x_TD, block_TD, self.spec, None), rest)
            return self._kept.joined(sent_TE, kept)
        if (count := len(self.spec.layers)) in self._kept.layers:
            kept[count] = self._layer_input(count, x_TD, block_TD)
        if self._last_streams is not None:
            x_TD = self._last_streams.reduce(x_TD)
            x_TD = x_TD if self._norm is None else self._norm(x_TD)
        else:
            x_TD = added(x_TD, block_TD, self.spec, self._norm)[self.spec.num_global_tokens :]
        if self.kept_width:
            states = (x_TD, *(kept[index] for index in self._kept.layers))
            self.kept_hidden_TE = torch.cat([each.float() for each in states], 1)
        return x_TD

    def _begin(self, inputs: Tensor, positions_T: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the hidden states that the first layer of the shard reads, and the inputs of layers."""
        received_TE: Tensor | None = None
        passed_TE: Tensor | None = None
        layer_inputs: Sequence[Tensor] = ()
        if self._embedding is not None:
            x_TD = self._embedding.forward(inputs, positions_T, self.placed, self.earlier_TW)
            if self._conditioning is not None and self.canvases is not None:
                x_TD = self._conditioning.apply(x_TD, self.canvases)
            if self._layer_inputs is not None:
                layer_inputs = self._layer_inputs.of_tokens(
                    inputs, x_TD, self.placed, self.earlier_TW
                )
            x_TD = self._embedding.expand(x_TD, positions_T)
        else:
            x_TD = inputs[:, : self._width]
            first_passed = inputs.shape[1] - self._passed_width
            if self._passed_width:
                passed_TE = inputs[:, first_passed:]
            if first_passed > self._width:
                received_TE = inputs[:, self._width : first_passed]
            if self._layer_inputs is not None and received_TE is not None:
                layer_inputs = self._layer_inputs.received(received_TE)
        if self._restarts is not None:
            self._restarts.begin(received_TE, x_TD)
        if self._passed is not None:
            self._passed.receive(passed_TE)
        return x_TD, layer_inputs

    def _sent(self, x_TD: Tensor, layer_inputs: Sequence[Tensor]) -> Tensor:
        """Return the hidden states, with whatever the next stage needs beside them."""
        if self._restarts is not None and self._next_width > self._width:
            return self._restarts.joined(x_TD)
        sent = [x_TD]
        if self._layer_inputs is not None and layer_inputs:
            sent += self._layer_inputs.sent(layer_inputs, x_TD.dtype)
        if self._passed is not None and (passed_TE := self._passed.sent()) is not None:
            sent.append(passed_TE.to(x_TD.dtype))
        return torch.cat(sent, -1) if len(sent) > 1 else x_TD

    def _share_router_state(self) -> RouterState:
        """Return what the routers of this stage pass on to each other."""
        state = RouterState()
        for layer in self._layers:
            if isinstance(layer, DecoderLayer) and layer.experts is not None:
                assert layer.experts.router.mlp is not None
                layer.experts.router.mlp.state = state
        return state

    def _rotary_tables(self, positions_T: Tensor) -> dict[RopeSpec, RotaryTables]:
        rotary = positions_T if self.rotary_T3 is None else self.rotary_T3
        if self.rotary_T3 is not None and INDEX_AXIS in self.spec.rotary_axes:
            rotary = torch.cat((rotary, positions_T[:, None].to(rotary.dtype)), 1)
        return {
            rope: self.kernels.rotary_tables(embedding, rotary if rope.axes else positions_T)
            for rope, embedding in self._ropes.items()
        }

    def _layer_input(self, layer: int, x_TD: Tensor, block_TD: Tensor | None) -> Tensor:
        """Return the residual stream before a layer, without changing it.

        With attention residuals, this is the sum to which the last block was added. With hyper-connections it is the
        mean of the streams, or all streams if the connections have a low rank.
        """
        if (hyper := self.spec.hyper_connections) is not None and not hyper.rank:
            return StreamMean(hyper).reduce(x_TD)
        if (residuals := self.spec.attention_residuals) is not None:
            first = residuals.stream_before(layer) * self.spec.hidden_size
            return x_TD[:, first : first + self.spec.hidden_size].clone()
        if block_TD is None:
            return x_TD.clone()
        return x_TD.add(block_TD, alpha=self.spec.residual_multiplier)

    @torch.inference_mode()
    def embed(self, ids_T: Tensor) -> Tensor:
        """Return the embeddings of tokens, float32 [T, D], without those of adapters.

        All tensor-parallel ranks must call this with the same tokens at the same time.
        """
        assert self._embedding is not None
        return self._embedding.base_rows(ids_T)

    @torch.inference_mode()
    def mix_embeddings(self, probabilities_KV: Tensor) -> Tensor:
        """Return the mean embeddings [K, D] of the tokens of distributions, as `embed` returns them.

        All tensor-parallel ranks must call this with the same probabilities at the same time.
        """
        assert self._embedding is not None
        return self._embedding.mix(probabilities_KV)

    @torch.inference_mode()
    def choose_tokens(
        self, hidden_SD: Tensor, slots_S: Int32Array, positions_S: Int32Array
    ) -> Tensor:
        """Return the tokens that the requests in these slots would sample from hidden states, int64 [S].

        Args:
            hidden_SD: Hidden states after the final norm.
            slots_S: The slots.
            positions_S: The index of the token that each row samples, which determines its random number.
        """
        logits_SV = self.compute_logits(hidden_SD.to(self.hidden_dtype), slots_S)
        return self._sampler.predict(logits_SV, slots_S, positions_S)

    @torch.inference_mode()
    def choose_among(
        self, ids_C: Tensor, logits_SC: Tensor, slots_S: Int32Array, positions_S: Int32Array
    ) -> Tensor:
        """Return the tokens, int64 [S], that the requests would sample if only the tokens `ids_C` had logits.

        Each row may have its own tokens, [S, C].
        """
        shape = len(slots_S), self.spec.vocab_size
        logits_SV = torch.full(shape, -torch.inf, device=logits_SC.device)
        logits_SV.scatter_(1, ids_C.expand(logits_SC.shape), logits_SC.float())
        return self._sampler.predict(logits_SV, slots_S, positions_S)

    @torch.inference_mode()
    def store_source(
        self, encoded_ED: Tensor, kv_caches: Sequence[Tensor], attn_metadata: Mapping[int, Any]
    ) -> None:
        """See `TorchDecoder`."""
        caches = iter(kv_caches)
        encoded_ED = encoded_ED.to(self.hidden_dtype)
        for layer in self._layers:
            of_layer = [next(caches) for _ in layer.cache_groups]
            if layer.cross is not None:
                layer.cross.store(encoded_ED, of_layer[-1], attn_metadata[layer.cache_groups[-1]])

    @torch.inference_mode()
    def store_keys(
        self,
        inputs_TD: Tensor,
        positions_T: Tensor,
        kv_caches: Sequence[Tensor],
        attn_metadata: Sequence[Any],
        *,
        has_norms: bool = False,
    ) -> None:
        """Store the keys and values that each layer computes from the same inputs [T, D].

        Only if it `has_norms`, a layer norms them first. The other arguments are those of `forward`.
        """
        tables, x_TD = self._rotary_tables(positions_T), inputs_TD.to(self.hidden_dtype)
        for layer, cache in zip(self._layers, kv_caches, strict=True):
            assert isinstance(layer, DecoderLayer)
            table = None if layer.rope is None else tables[layer.rope]
            (group,) = layer.cache_groups
            caches = [(cache, attn_metadata[group])]
            step = LayerStep(positions_T, table, caches, None, False)
            layer.store_keys(x_TD, step, has_norm=has_norms)

    def record_queries(self, recorder: QueryRecorder | None) -> None:
        """See `TorchDecoder`."""
        for index, layer in zip(self.shard.layers, self._layers, strict=True):
            if layer.cross is not None:
                layer.cross.index, layer.cross.recorder = index, recorder

    @torch.inference_mode()
    def join_round(self) -> None:
        """See `TorchDecoder`."""
        like = torch.empty(0, dtype=self.hidden_dtype, device=self.attention.device)
        for layer in self._layers:
            if isinstance(layer, DecoderLayer) and layer.experts is not None:
                layer.experts.join_round(like)

    @torch.inference_mode()
    def compute_logits(self, hidden_SD: Tensor, slots_S: Int32Array | None = None) -> Tensor:
        """Return the logits [S, V] in float32, with the LoRA adapters of these slots; None for the base model."""
        return self._head.logits(hidden_SD, slots_S)


def _make_layers(of_model: LayerSource, attention: DeviceAttention) -> list[AnyLayer]:
    spec, weights, _, shard, kernels = of_model
    layers: list[AnyLayer] = []
    blocks: dict[int, Block] = {}
    of_weights: dict[int, DecoderLayer] = {}
    for i in shard.layers:
        layer = spec.layers[i]
        own = spec.for_layer(layer)
        number = i if layer.weights is None else layer.weights
        if number in of_weights:
            layers.append(of_weights[number])
            continue
        source = of_model._replace(spec=own, prefix=f"layers.{number}.")
        if layer.shared_block is not None:
            block = layer.shared_block.source
            if block not in blocks:
                blocks[block] = Block(own, block, weights, as_backend(attention), shard, kernels)
            layers.append(SharedBlockLayer(layer, blocks[block], source))
        elif spec.altup is not None:
            layers.append(AltUpLayer(spec.altup, layer, source, as_backend(attention)))
        elif spec.predicted_stream is not None:
            of_both = spec.predicted_stream
            layers.append(PredictedStreamLayer(of_both, layer, source, as_backend(attention)))
        elif (hyper := spec.hyper_connections) is not None:
            layers.append(HyperLayer(hyper, layer, source, attention))
        else:
            decoder = _layer_kind(own, layer)(layer, source, attention)
            if isinstance(decoder, MemoryGateLayer) and layer.memory_source is not None:
                decoder.read_memory(of_weights[layer.memory_source])
            if spec.latent is not None and layer.kv_source is not None and layer.chooses_keys:
                decoder.copy_keys(of_weights[layer.kv_source])
            of_weights[number] = decoder
            layers.append(decoder)
    share_experts([x.banked for x in layers if isinstance(x, DecoderLayer) and x.banked], of_model)
    return layers


def _layer_kind(spec: ModelSpec, layer: LayerSpec) -> type[DecoderLayer]:
    if spec.bottleneck is not None:
        return BottleneckLayer
    if layer.reads_source and not layer.attends:
        return ImageReaderLayer
    if isinstance(layer.recurrent, HeadConvolutions):
        return MixedHeadsLayer
    if isinstance(layer.recurrent, Rwkv4 | Rwkv6 | Rwkv7):
        return TokenShiftLayer
    has_convolutions = isinstance(layer.recurrent, InnerConvolutions)
    if spec.attention_residuals is not None:
        return ConvolvedResidualLayer if has_convolutions else AttentionResidualLayer
    if has_convolutions:
        return ConvolvedLayer
    if layer.block_convolution is not None:
        return BlockConvolvedLayer
    if layer.input_convolution is not None:
        return InputConvolutionLayer
    if layer.memory_source is not None:
        return MemoryGateLayer
    if layer.neighbors is not None:
        return NeighborsLayer
    if spec.norms_stream:
        return NormedStreamLayer
    return ParallelLayer if spec.is_parallel else DecoderLayer
