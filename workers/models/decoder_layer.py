"""A layer of a decoder.

Shapes: T tokens of a step, D hidden size, P size of a layer's own inputs.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...protocol.checkpoint.recurrent_layers import ConvolvedAttention
from ..attention import DeviceAttention, as_backend
from ..attention.compressed import CompressedCache
from ..layers.layer_spec import LayerSpec
from ..layers.layers import Linear, RMSNorm
from .attention import Attention
from .attention_kinds.block_sums import BlockSumAttention
from .attention_kinds.differential import DifferentialAttention
from .attention_kinds.experts import ExpertAttention
from .attention_kinds.first_token import FirstTokenAttention
from .attention_kinds.global_tokens import GlobalTokenAttention
from .attention_kinds.key_biases import KeyBiasAttention
from .attention_kinds.kind import AttentionKind
from .attention_kinds.loops import LoopAttention
from .attention_kinds.spans import SpanAttention
from .attention_kinds.token_scales import ScaledAttention
from .compressed.attention import CompressedAttention
from .cross_attention import CrossAttention
from .experts.banks import BankedExperts
from .experts.mixture import Experts, ExpertsBesideMLP
from .experts.pairs import PairExperts
from .latent.attention import LatentAttention
from .layer_kinds.residual_gate import OutputFactor, ResidualFactor, ResidualGate, ResidualScale
from .layer_source import LayerSource
from .layer_step import LayerStep
from .mixers import Mixer, make_mixer
from .mlp import MLP
from .norms import added, read_norm
from .per_layer_inputs import PerLayerBlock

AnyAttention: TypeAlias = (
    Attention | AttentionKind | CompressedAttention | LatentAttention | LoopAttention
)

AnyResidual: TypeAlias = OutputFactor | ResidualFactor | ResidualGate | ResidualScale


def _attention(layer: LayerSpec, source: LayerSource, backend: DeviceAttention) -> AnyAttention:
    spec = source.spec
    if spec.compressed is not None:
        assert isinstance(backend, CompressedCache)
        return CompressedAttention(spec.compressed, layer, source, backend)
    calls = as_backend(backend)
    if layer.difference is not None:
        return DifferentialAttention(layer, source, calls)
    if spec.loop_window:
        return LoopAttention(layer, source, calls)
    if spec.reads_first_token:
        return FirstTokenAttention(layer, source, calls)
    if layer.token_blocks is not None:
        return GlobalTokenAttention(layer, source, calls)
    if spec.summed_block_size:
        return BlockSumAttention(layer, source, calls)
    if spec.has_key_biases:
        return KeyBiasAttention(layer, source, calls)
    if spec.has_token_scales:
        return ScaledAttention(layer, source, calls)
    if spec.num_span_taps:
        return SpanAttention(layer, source, calls)
    if spec.num_attention_experts:
        return ExpertAttention(layer, source, calls)
    if spec.latent is None:
        return Attention(layer, source, calls)
    return LatentAttention(spec.latent, layer, source, calls)


class DecoderLayer:
    """A decoder layer: attention or a recurrent mixer or both, then an MLP or experts, each with its norms.

    Each block reads the residual stream and adds its output to it.
    """

    def __init__(self, layer: LayerSpec, source: LayerSource, attention: DeviceAttention) -> None:
        spec, weights, prefix, kernels = source.spec, source.weights, source.prefix, source.kernels

        def norm(name: str | None, consumer: Linear | None = None) -> RMSNorm | None:
            if name is None:
                return None
            if spec.interpolates_blocks:
                # The stream needs the exact values of the norm.
                consumer = None
            return read_norm(spec, weights, f"{prefix}{name}", kernels, consumer)

        norms = layer.norms or spec.norms
        self.rope = layer.rope
        self.cache_groups = layer.cache_groups
        self._reads_input = layer.input_size > 0
        self._reads_images = spec.source is not None and spec.source.are_images
        self._spec = spec
        self._attention: AnyAttention | None = None
        self.mixer: Mixer | None = None
        """The recurrent part, if the layer has one beside attention or instead of it."""
        self.cross: CrossAttention | None = None
        consumer = None
        if layer.attends:
            self._attention = _attention(layer, source.at("self_attn."), attention)
            if not (spec.latent and spec.latent.indexer and spec.latent.indexer.norms_inputs):
                consumer = self._attention.qkv
        if layer.recurrent is not None and not isinstance(layer.recurrent, ConvolvedAttention):
            self.mixer = make_mixer(layer.recurrent, source.at("mixer."))
        if layer.reads_source:
            self.cross = CrossAttention(source.at("cross_attn."), as_backend(attention))
            self._cross_input_norm = norm(norms.cross_input, self.cross.queries)
            self._cross_output_norm = norm(norms.cross_output)
        is_shared = spec.is_parallel and norms.mlp_input is None
        self._attention_input_norm = self._attention_output_norm = None
        if layer.cache_groups:
            self._attention_input_norm = norm(
                norms.attention_input,
                None if is_shared or self.mixer is not None else consumer,
            )
            self._attention_output_norm = norm(norms.attention_output)
            self._attention_sum_norm = norm(norms.attention_sum)
        self._attention_gate: AnyResidual | None = None
        self._mlp_gate: AnyResidual | None = None
        gates: tuple[tuple[object, type[AnyResidual], tuple[str | None, str | None]], ...] = (
            (spec.has_output_factors, OutputFactor, ("attn_layer_scale", "ffn_layer_scale")),
            (
                spec.has_stream_factors,
                ResidualFactor,
                ("input_residual", "post_attention_residual"),
            ),
            (spec.has_residual_scales, ResidualScale, ("attention_scale", "mlp_scale")),
            (spec.residual_temperature, ResidualGate, (norms.attention_output, norms.mlp_output)),
        )
        for exists, kind, names in gates:
            if exists:
                self._attention_gate, self._mlp_gate = (
                    kind(spec, weights, f"{prefix}{name}") for name in names
                )
        self._per_layer: PerLayerBlock | None = None
        if spec.per_layer_inputs is not None:
            self._per_layer = PerLayerBlock(spec.per_layer_inputs, source)
        self._scale_1: Tensor | None = None
        if spec.has_layer_scales:
            self._scale_1 = weights.read(f"{prefix}layer_scalar", 1)
        if spec.self_conditioning_size:
            self._scale_before_canvas_1 = weights.read(f"{prefix}scale_before_canvas", 1)
        self._embedding_scale_1: Tensor | None = None
        if spec.adds_embeddings:
            self._embedding_scale_1 = weights.read_elements(f"{prefix}embedding_scale", 1)
        self._beside: ExpertsBesideMLP | None = None
        self._mlp: MLP | Experts | BankedExperts | PairExperts | None = None
        self.shortcut: Experts | None = None
        self.shortcut_TD: Tensor | None = None
        self.previous: DecoderLayer | None = None
        """The layer before this one, if the output of its experts is added after this one."""
        self._replaces_stream = layer.replaces_stream
        self._routes_input = layer.experts is not None and layer.experts.routes_input
        if not layer.has_mlp:
            return
        experts = layer.experts
        if experts is not None and experts.is_shortcut:
            self.shortcut = Experts(experts, source.at("shortcut."))
            experts = None
        if experts is not None and experts.has_own_norms:
            self._beside = ExpertsBesideMLP(experts, source)
            experts = None
        if experts is not None and experts.bank is not None:
            self._mlp = BankedExperts(experts, source.at("mlp."))
        elif experts is not None:
            self._mlp = Experts(experts, source.at("mlp."), layer.gate_limit)
        elif spec.pair_experts is not None:
            self._mlp = PairExperts(spec.pair_experts, source.at("mlp."))
        elif layer.has_dense_mlp:
            self._mlp = MLP(source.at("mlp."), spec.intermediate_size, limit=layer.gate_limit)
        # Experts need the exact values of the norm.
        consumer = None if self._mlp is None or self.shortcut is not None else self._mlp.gate_up
        self._mlp_input_norm = norm(norms.mlp_input, consumer)
        self._mlp_output_norm = norm(norms.mlp_output)

    def copy_keys(self, source: DecoderLayer) -> None:
        """Store copies of the keys of another layer, which must run first in every step."""
        assert isinstance(self._attention, LatentAttention)
        assert isinstance(source._attention, LatentAttention)
        self._attention.copy_keys(source._attention)

    def store_keys(self, x_TD: Tensor, step: LayerStep, *, has_norm: bool = False) -> None:
        """Store the keys and values of `x_TD`, with the norm of the layer's input if they have it."""
        if has_norm and self._attention_input_norm is not None:
            x_TD = self._attention_input_norm(x_TD)
        assert isinstance(self._attention, Attention | CompressedAttention | LatentAttention)
        self._attention.store_keys(x_TD, step.tables, *step.caches[0])

    def forward(self, x_TD: Tensor, block_TD: Tensor | None, step: LayerStep) -> Tensor | None:
        """Add the previous block's output to the stream `x_TD`. Return the output to be added next, if any."""
        input_TD: Tensor | None = None
        if self.cache_groups:
            x = added(
                x_TD,
                block_TD,
                self._spec,
                self._attention_input_norm,
                replaces_stream=self._replaces_stream,
            )
            if self._routes_input:
                input_TD = x_TD.clone()
            if self._reads_input:
                x = step.own_TP
            block_TD = self._mixed(x, step)
            if self._attention_output_norm is not None:
                block_TD = self._attention_output_norm(block_TD)
            if self._attention_gate is not None:
                block_TD = self._attention_gate.scale(x_TD, block_TD)
            if self.cross is not None and not (self._reads_images and self.cross.reads_T1 is None):
                x = added(x_TD, block_TD, self._spec, self._cross_input_norm)
                block_TD = self.cross.forward(x, *step.caches[-1])
                if self._cross_output_norm is not None:
                    block_TD = self._cross_output_norm(block_TD)
                if self._reads_images and self.cross.reads_T1 is not None:
                    block_TD = block_TD.masked_fill(~self.cross.reads_T1, 0)
        if self._mlp is None and self.shortcut is None:
            return block_TD
        x = added(x_TD, block_TD, self._spec, self._mlp_input_norm)
        if self.shortcut is not None:
            self.shortcut_TD = self.shortcut.forward(x)
        if self._mlp is None:
            return None
        if input_TD is None:
            block_TD = self._feed(x, step.own_TP)
        else:
            assert isinstance(self._mlp, Experts)
            block_TD = self._mlp.forward(x, input_TD)
        if self.previous is not None and self.previous.shortcut_TD is not None:
            block_TD = block_TD + self.previous.shortcut_TD
            self.previous.shortcut_TD = None
        if self._beside is not None:
            block_TD = self._beside.forward(block_TD, x_TD)
        if self._mlp_output_norm is not None:
            block_TD = self._mlp_output_norm(block_TD)
        if self._mlp_gate is not None:
            block_TD = self._mlp_gate.scale(x_TD, block_TD)
        if self._per_layer is not None and step.own_TP is not None:
            added(x_TD, block_TD, self._spec, None)
            block_TD = self._per_layer.forward(x_TD, step.own_TP)
        if self._embedding_scale_1 is not None and step.own_TP is not None:
            added(x_TD, block_TD, self._spec, None)
            return step.own_TP * self._embedding_scale_1.to(step.own_TP.dtype)
        if self._scale_1 is None:
            return block_TD
        scale = self._scale_1
        if step.is_canvas_T1 is not None:
            scale = torch.where(step.is_canvas_T1, scale, self._scale_before_canvas_1)
        added(x_TD, block_TD, self._spec, None).mul_(scale)
        return None

    def _feed(self, x_TD: Any, inputs_TP: Tensor | None) -> Tensor:
        """Return the output of the MLP or the experts. If the layer has inputs for experts, they are the tokens."""
        assert self._mlp is not None
        if isinstance(self._mlp, Experts):
            return self._mlp.forward(x_TD, token_ids_T=inputs_TP)
        return self._mlp.forward(x_TD)

    @property
    def experts(self) -> Experts | None:
        """The mixture of experts of the layer, if it has one."""
        if self._beside is not None:
            return self._beside.experts
        if self.shortcut is not None:
            return self.shortcut
        if self.banked is not None:
            return self.banked.experts
        return self._mlp if isinstance(self._mlp, Experts) else None

    @property
    def banked(self) -> BankedExperts | None:
        """The experts that other layers have as well, if the layer has some."""
        return self._mlp if isinstance(self._mlp, BankedExperts) else None

    def _mixed(self, x: Any, step: LayerStep) -> Tensor:
        """Return the sum of the outputs of attention and recurrent mixer."""
        outputs = []
        if isinstance(self._attention, CompressedAttention):
            return self._attention.forward(x, step.tables, step.caches)
        if self._attention is not None:
            inputs = (x, step.positions_T, step.tables, *step.caches[0])
            if isinstance(self._attention, LoopAttention):
                attended_TD = self._attention.forward(*inputs, is_repeated=step.is_repeated)
            else:
                attended_TD = self._attention.forward(*inputs)
            outputs.append((attended_TD, self._spec.attention_multiplier))
        if self.mixer is not None:
            self.mixer.tables = step.tables
            mixed_TD = self.mixer.forward(x, *step.caches[-1])
            outputs.append((mixed_TD, self._spec.recurrent_multiplier))
        scaled = [y_TD if factor == 1.0 else y_TD * factor for y_TD, factor in outputs]
        return scaled[0] if len(scaled) == 1 else scaled[0] + scaled[1]
