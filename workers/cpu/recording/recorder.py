"""Record a model's operations in a native program, while its weights are read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from ....protocol.checkpoint.recurrent_layers import ConvolvedAttention
from ....protocol.config.audio.bases import AddedSpec
from ...layers.layer_spec import LayerSpec
from ...layers.parallel.shard import ModelShard
from ...layers.rope import RopeSpec
from ...layers.shared_block import Restart
from ...layers.spec import ModelSpec
from ...layers.specs.experts import ExpertsSpec
from ...layers.specs.norm_names import NormNames
from ...models.mlp import read_xielu
from ..experts import NativeExperts
from ..library import NotSupportedNatively
from ..packing import PackedWeight
from ..program import Floats, NativeProgram
from ..weights import NativeWeightReader, intermediate_shares
from .attention import AttentionRecorder
from .blocks import BLOCK, BlockRecorder
from .compressed import CompressedRecorder
from .embedding import record_embedding
from .experts import record_experts, record_experts_beside, route_input
from .head import record_head, record_head_dense
from .inner_convolutions import ConvolutionRecorder, record_convolutions
from .latent import LatentRecorder
from .layer_inputs import LayerInputsRecorder
from .mixers import record_mixer
from .ngrams import record_ngrams
from .shared_blocks import SharedBlockRecorder
from .streams.altup import AltUpRecorder
from .streams.attention_residuals import AttentionResidualRecorder
from .streams.hyper_connections import HyperRecorder


class Recorder:
    """Records the layers of this shard in a program, together with their weights.

    The operations that fill the caches of cross attention, or in a model without it those that only store keys and
    values, are recorded in the separate program `store`. `kept_columns` are layers whose inputs are written to the
    hidden states of the step, each with its first column. The number of layers means the input of the final norm.
    """

    def __init__(
        self,
        program: NativeProgram,
        spec: ModelSpec,
        shard: ModelShard,
        weights: NativeWeightReader,
        max_model_len: int,
        store: NativeProgram | None = None,
        *,
        places_embeddings: bool = False,
        kept_columns: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._places_embeddings = places_embeddings
        self._kept_columns = kept_columns
        self.embedding: PackedWeight | None = None
        """The packed embedding of tokens, once it is recorded."""
        self._program = program
        self._store = None
        if store is not None and spec.source is not None:
            encoder = spec.source.encoder
            if encoder is None:
                encoder = replace(spec, hidden_size=spec.source.hidden_size)
            self._store = BlockRecorder(store, encoder, shard, weights)
        elif store is not None:
            self._store = BlockRecorder(store, spec, shard, weights)
        self._spec = spec
        self._shard = shard
        self._weights = weights
        self._max_model_len = max_model_len
        self._ropes: dict[RopeSpec, int] = {}
        self._num_caches = 0
        self._caches: dict[int, int] = {}
        self._recorded: dict[int, tuple[range, int]] = {}
        self._adds_shortcut = False
        for layer in spec.layers:
            if layer.rope is not None and layer.rope not in self._ropes:
                factors = None
                if layer.rope.has_factors:
                    factors = weights.vector("rotary_emb.alpha", layer.rope.rotary_dim // 2)
                program.add_rope(layer.rope, max_model_len, factors)
                if store is not None and spec.source is None:
                    store.add_rope(layer.rope, max_model_len, factors)
                self._ropes[layer.rope] = len(self._ropes)
        self._blocks = BlockRecorder(program, spec, shard, weights)
        self._altup: AltUpRecorder | None = None
        if spec.altup is not None:
            self._altup = AltUpRecorder(self._blocks, spec.altup)
        self._streams: HyperRecorder | AttentionResidualRecorder | None = None
        if spec.hyper_connections is not None:
            self._streams = HyperRecorder(self._blocks, spec.hyper_connections)
        if spec.attention_residuals is not None:
            self._streams = AttentionResidualRecorder(self._blocks, spec.attention_residuals)
        self._layer_inputs: LayerInputsRecorder | None = None
        if spec.per_layer_inputs is not None:
            self._layer_inputs = LayerInputsRecorder(self._blocks, spec.per_layer_inputs)
        residuals = None
        if isinstance(self._streams, AttentionResidualRecorder):
            residuals = self._streams
        self._attention = AttentionRecorder(
            self._blocks, self._ropes, max_model_len, self._altup, residuals
        )
        self._latent = LatentRecorder(self._blocks, self._ropes, self._caches)
        self._compressed = CompressedRecorder(self._blocks, self._ropes)
        self._shared = SharedBlockRecorder(self._blocks, self._attention)

    def record(self) -> None:
        """Record all operations.

        Without an embedding, the program starts from the hidden states of the previous stage. Without a final norm, its
        hidden states are for the next stage.
        """
        spec, weights, shard, program = self._spec, self._weights, self._shard, self._program
        if not (spec.is_causal or self._blocks.is_alone):
            raise NotSupportedNatively(
                "the native CPU backend does not support encoders with --tensor-parallel-size"
            )
        if self._store is not None:
            self._store.program.add_op("embed")
        self._record_inputs()
        streams = self._altup or self._streams
        if shard.is_first and streams is not None:
            streams.expand()
        for place, index in enumerate(shard.layers):
            if (restart := spec.layers[index].restart) is not None:
                self._record_restart(restart)
            self._keep_hidden(index)
            layer = spec.layers[index]
            program.is_optional = layer.reads_source and not layer.attends
            self._record_or_repeat(place, index)
            program.is_optional = False
            if index in spec.added_after:
                number = 1 + spec.added_after.index(index)
                program.add_op("add_placed", first_column=number * spec.hidden_size)
        if shard.is_last and streams is not None:
            if self._streams is not None:
                self._keep_hidden(len(spec.layers))
            streams.reduce()
        self._record_outputs()
        if self._store is not None:
            self._store.program.add_op("final_norm")
            self._store.program.add_op("head")
        weights.finish()

    def _record_inputs(self) -> None:
        """Record the hidden states that the first layer reads, and the inputs of layers beside them."""
        spec, program = self._spec, self._program
        if not self._shard.is_first:
            program.add_op("embed")
            return
        positions: list[PackedWeight] = []
        if spec.has_embedding:
            self.embedding, positions = record_embedding(self._blocks, self._max_model_len)
        else:
            program.add_op("embed")
        if spec.dropped_token is not None:
            program.add_op("drop_masked", source=spec.dropped_token)
        has_tower = (spec.encoder or spec.audio_encoder) is not None
        are_added = isinstance(spec.audio_encoder, AddedSpec)
        has_norm = spec.has_embedding and spec.has_embedding_norm
        if has_norm and spec.places_after_norm:
            if positions:
                # The norm includes positions. Outputs of a tower, which it changes, too, are placed again.
                program.add_op("place", parts=positions)
                positions = []
            program.add_op("norm", vectors=self._blocks.hidden_norm("embed_norm"))
        if has_tower or self._places_embeddings:
            if are_added:
                program.add_op("add_placed")
            else:
                program.add_op("place", parts=positions)
        if has_norm and not spec.places_after_norm:
            program.add_op("norm", vectors=self._blocks.hidden_norm("embed_norm"))
        if spec.has_embedding and spec.has_residual_scales:
            factor, bias = (
                self._weights.vector(f"embed_{of}", spec.hidden_size) for of in ("scale", "bias")
            )
            program.add_op("scale_add", vectors=[factor, None, bias * factor])
        if self._layer_inputs is not None:
            self._layer_inputs.record()
        if spec.last_embedding_layer >= 0:
            program.add_op("keep_inputs")
        if spec.last_token_layer >= 0:
            program.add_op("keep_token")

    def _record_outputs(self) -> None:
        """Record the normed hidden states and the logits, or what the next stage needs."""
        spec, shard, program = self._spec, self._shard, self._program
        if not shard.is_last:
            size = 0 if spec.per_layer_inputs is None else spec.per_layer_inputs.size
            own_width = spec.stage_width(shard.num_layers)
            program.add_op(
                "final_norm",
                first_column=len(shard.layers) * size,
                num_columns=spec.stage_width(shard.layers.stop) - own_width,
            )
            program.add_op("head")
            return
        if self._streams is None:
            self._keep_hidden(len(spec.layers))
        if spec.has_head and spec.head_dense_bias is not None:
            record_head_dense(self._blocks)
        elif spec.has_final_norm:
            norm = self._blocks.hidden_norm("norm")
            program.add_op("final_norm", vectors=norm, eps=spec.hidden_norm_eps("norm"))
        else:
            program.add_op("keep_hidden")
        if spec.has_head:
            record_head(self._blocks, self.embedding)
        else:
            program.add_op("head")

    def _keep_hidden(self, index: int) -> None:
        """Record the operation that keeps the input of a layer, if it is kept.

        With hyper-connections, it consists of all streams. With attention residuals, it is the sum to which the last
        block was added.
        """
        spec, source, width = self._spec, 0, 0
        if spec.hyper_connections is not None:
            width = spec.num_streams * spec.hidden_size
        elif spec.attention_residuals is not None:
            width = spec.hidden_size
            source = width * spec.attention_residuals.stream_before(index)
        for kept, column in self._kept_columns:
            if kept == index:
                self._program.add_op(
                    "keep_hidden", first_column=column, num_columns=width, source=source
                )

    def _record_restart(self, restart: Restart) -> None:
        """Record the begin of a pass through layers that are computed several times."""
        program, size = self._program, self._spec.hidden_size
        if restart.copies_sums:
            assert isinstance(self._streams, AttentionResidualRecorder)
            self._streams.copy_sums()
        if restart.norms:
            weighted = restart.has_norm_weights
            weight = self._blocks.norm("norm", size) if weighted else np.ones(size, np.float32)
            program.add_op("norm", vectors=[weight])
        if restart.keeps is not None:
            program.add_op("keep_inputs", first_column=restart.keeps * size)
        if restart.adds is not None:
            if restart.share:
                program.add_op("scale", scale=(1 - restart.share) / restart.share)
            program.add_op("add_kept", first_column=restart.adds * size)
            if restart.share:
                program.add_op("scale", scale=restart.share)
        elif restart.adds_initial and self._weights.has("initial_state"):
            initial = self._weights.vector("initial_state", size)
            program.add_op("add_kept", vectors=[initial])

    def _record_or_repeat(self, place: int, index: int) -> None:
        """Record a layer, or repeat the operations of one with the same weights. `place` is its index in this shard."""
        layer = self._spec.layers[index]
        source = index if layer.weights is None else layer.weights
        first_op, first_cache = self._program.num_ops, self._num_caches
        self._caches[index] = first_cache
        if source not in self._recorded:
            self._record_layer(place, f"layers.{source}.", layer)
            self._recorded[source] = range(first_op, self._program.num_ops), first_cache
            return
        ops, cache = self._recorded[source]
        self._program.repeat(ops, first_cache - cache, layer.cache_groups)
        self._num_caches += len(layer.cache_groups)

    def _record_layer(self, place: int, prefix: str, layer: LayerSpec) -> None:
        """Record a layer. `place` is its index in this shard."""
        spec, program, streams = self._spec, self._program, self._streams
        norms, index = layer.norms or spec.norms, self._shard.layers[place]
        if spec.ngrams is not None and layer.ngram_table is not None:
            record_ngrams(self._blocks, spec.ngrams, self._num_caches, prefix, layer)
        altup = None if self._altup is None else self._altup.predict(prefix)
        if streams is not None:
            streams.mix(prefix, index, is_mlp=False)
        convolutions = record_convolutions(self._blocks, self._num_caches + 1, prefix, layer)
        routed: NativeExperts | None = None
        if layer.experts is not None and layer.experts.routes_input:
            routed = route_input(self._blocks, prefix, layer.experts)
        self._record_mixing(prefix, layer, norms, convolutions)
        if streams is not None:
            streams.update()
            streams.mix(prefix, index, is_mlp=True)
        if layer.reads_source:
            cache = self._num_caches - 1
            self._attention.record_cross(cache, prefix, layer, norms)
            assert self._store is not None
            self._attention.record_storing(cache, layer.cross_group, prefix, self._store)
        if altup is not None:
            # Now the residual stream is the sum of the attention's output and the low-rank product.
            program.add_op("scale", scale=0.5**0.5)
        has_shortcut = layer.experts is not None and layer.experts.is_shortcut
        target = None if convolutions is None else BLOCK
        if layer.has_mlp and layer.experts is not None:
            self._record_experts(place, prefix, layer, layer.experts, norms, target, routed)
        if layer.has_dense_mlp and (layer.experts is None or has_shortcut):
            self._record_mlp(prefix, layer, norms, target)
        if convolutions is not None:
            convolutions.finish_mlp()
        if self._adds_shortcut:
            program.add_op("add_shortcut", scale=spec.residual_multiplier)
        self._adds_shortcut = has_shortcut
        if spec.is_parallel and layer.experts is not None:
            scale = spec.residual_multiplier * spec.attention_multiplier
            program.add_op("add_shortcut", scale=scale)
        if self._altup is not None and altup is not None:
            self._altup.correct(altup)
        if streams is not None:
            streams.update()
        if self._layer_inputs is not None:
            self._layer_inputs.record_block(place, prefix)
            norm = self._blocks.hidden_norm(f"{prefix}post_per_layer_input_norm")
            if self._altup is not None:
                program.add_op("add_to_streams", vectors=norm)
            else:
                program.add_op("norm_add", vectors=norm, scale=spec.residual_multiplier)
        if spec.has_layer_scales:
            scale = self._weights.vector(f"{prefix}layer_scalar", 1).item()
            program.add_op("scale", scale=scale)
        if spec.adds_embeddings:
            scale = self._weights.vector(f"{prefix}embedding_scale", 1).item()
            program.add_op("add_kept", scale=scale)

    def _record_mixing(
        self,
        prefix: str,
        layer: LayerSpec,
        norms: NormNames,
        convolutions: ConvolutionRecorder | None,
    ) -> None:
        """Record the attention and the recurrent part of a layer, whichever it has.

        If it has both, the recurrent part comes first, and attention reads the same quantized input.
        """
        index = self._num_caches
        self._num_caches += len(layer.cache_groups)
        kind = None
        recurrent = layer.recurrent
        if isinstance(recurrent, ConvolvedAttention):
            recurrent = None
        if layer.shared_block is not None and recurrent is not None:
            self._shared.record(index, prefix, layer, layer.shared_block)
            record_mixer(
                self._blocks,
                index + 1,
                prefix,
                layer,
                recurrent,
                norms,
                self._ropes,
                "quantize_sum",
            )
            return
        if recurrent is not None:
            kind = record_mixer(
                self._blocks, index + layer.attends, prefix, layer, recurrent, norms, self._ropes
            )
        if layer.attends and self._spec.latent is not None:
            self._latent.record(index, prefix, layer, norms, self._store)
        elif layer.attends and self._spec.compressed is not None:
            self._compressed.record(index, prefix, layer, norms, self._spec.compressed)
        elif layer.attends:
            store = None if self._spec.source is not None else self._store
            self._attention.record(index, prefix, layer, norms, kind, convolutions, store)

    def _record_experts(
        self,
        place: int,
        prefix: str,
        layer: LayerSpec,
        experts: ExpertsSpec,
        norms: NormNames,
        target: int | None,
        routed: NativeExperts | None,
    ) -> None:
        """Record the mixture of experts of a layer, and an MLP that is added to it, if any.

        `place` is the layer's index. `target` is the place of the output, if given. `routed` are the experts if they
        have been chosen.
        """
        if not experts.has_own_norms:
            if self._spec.is_parallel and norms.mlp_input is None:
                norms = replace(norms, mlp_input=norms.attention_input)
            limit = layer.gate_limit
            return record_experts(
                self._blocks, place, prefix, experts, norms, limit, target, routed
            )
        size = self._spec.for_layer(layer).intermediate_size
        mlp = self._blocks.read_mlp(f"{prefix}mlp.", size)
        return record_experts_beside(self._blocks, place, prefix, experts, mlp, norms)

    def _record_mlp(
        self, prefix: str, layer: LayerSpec, norms: NormNames, target: int | None
    ) -> None:
        """Record the MLP of a layer. `target` is the place of its output, if given."""
        spec, size = self._spec, self._spec.for_layer(layer).intermediate_size
        mlp = self._blocks.read_mlp(f"{prefix}mlp.", size)
        norm = norms.mlp_input
        if spec.is_parallel and norm is None:
            norm = norms.attention_input
        input_kind = self._blocks.quantize(prefix, norm, mlp.gate_up)
        if layer.activation_sparsity:
            sparsity = layer.activation_sparsity
            self._blocks.add_sparse_gated(mlp, input_kind, sparsity, size)
        else:
            xielu = self._xielu(f"{prefix}mlp.act_fn.") if spec.activation == "xielu" else None
            self._blocks.add_gated(mlp, input_kind, xielu, layer.gate_limit)
        if spec.has_inner_norms:
            ranks = self._shard.tensor_parallel
            part = intermediate_shares(size, ranks)[ranks.rank]
            self._blocks.add_inner_norm(f"{prefix}mlp.ffn_sub_norm", size, part, mlp.down)
        if layer.reads_source and not layer.attends:
            self._blocks.add_read_block(f"{prefix}cross_attn_mlp_gate", mlp.down)
            return
        self._blocks.add_block(
            prefix,
            mlp.down,
            mlp.down_bias,
            norms.mlp_output,
            spec.mlp_multiplier,
            source=0 if spec.has_inner_norms else 1,
            target=target,
        )
        if spec.is_parallel:
            scale = spec.residual_multiplier * spec.attention_multiplier
            self._program.add_op("norm_add", scale=scale)

    def _xielu(self, prefix: str) -> Floats:
        """Return the parameters of `Xielu` in csrc/rows/kernels.h for one layer."""
        xielu = read_xielu(self._weights, prefix)
        return np.array(
            [xielu.alpha_p.item(), xielu.alpha_n.item(), xielu.beta.item(), xielu.eps.item()],
            np.float32,
        )
