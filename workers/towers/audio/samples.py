"""The encoder of wav2vec 2.0, and a decoder or a projection of its rows.

Shapes: C channels, N samples or outputs of a convolution, P rows, D hidden size, R written tokens, O size of an output.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.audio.ctc_conformers import CONFORMER_NAMES
from ....protocol.config.audio.conformer_layers import Convolutions
from ....protocol.config.audio.samples import SamplesSpec
from ...layers.distance_buckets import distance_buckets
from ..image_tower import TowerSource
from ..layers import LayersSpec, LayerWeights, Patches
from ..weights import Linear, Norm, VisionWeights, find_activation
from .conformer_layers import ConformerStack
from .distances import LayerDistances, read_distance_table
from .stems import sinusoids
from .token_decoders import read_token_decoder

_CONV_NORM_EPS = 1e-5
_NAMES = (
    (r"^model\.", ""),
    # The names of SEW.
    (r"^(sew|sew_d|encoder)\.layer_norm\.", "audio_tower.subsampling.layer_norm."),
    (r"^\w+\.feature_projection\.(weight|bias)$", r"audio_tower.subsampling.projection.\1"),
    # The names of SpeechT5.
    (r"^speecht5\.encoder\.prenet\.feature_(encoder|projection)\.", "audio_tower.subsampling."),
    (r"^speecht5\.encoder\.prenet\.pos_conv_embed\.", "audio_tower.encode_positions."),
    (r"^speecht5\.encoder\.wrapped_encoder\.", "audio_tower."),
    # The names of transformers' Wav2Vec2ForCTC, whose model has the name of its kind, or of "encoder" beside a decoder.
    (r"^\w+\.feature_extractor\.", "audio_tower.subsampling."),
    (r"^\w+\.feature_projection\.", "audio_tower.subsampling."),
    (r"^\w+\.encoder\.pos_conv_embed\.", "audio_tower.encode_positions."),
    (r"^\w+\.encoder\.", "audio_tower."),
    (r"\.parametrizations\.weight\.original0$", ".weight_g"),
    (r"\.parametrizations\.weight\.original1$", ".weight_v"),
    (r"^\w+\.adapter\.", "adapter."),
    (r"^enc_to_dec_proj\.", "multi_modal_projector."),
    (r"^lm_head\.", "ctc_head."),
    # The names of SEW-D's layers.
    (r"^audio_tower\.encoder\.layer\.", "audio_tower.layers."),
    (r"\.attention\.self\.([qkv])\w+_proj\.", r".attention.\1_proj."),
    (r"\.attention\.output\.dense\.", ".attention.out_proj."),
    (r"\.attention\.output\.LayerNorm\.", ".layer_norm."),
    (r"(\.layers\.\d+)\.intermediate\.dense\.", r"\1.feed_forward.intermediate_dense."),
    (r"(\.layers\.\d+)\.output\.dense\.", r"\1.feed_forward.output_dense."),
    (r"(\.layers\.\d+)\.output\.LayerNorm\.", r"\1.final_layer_norm."),
)
_MARKER = "audio_tower.subsampling.conv_layers.0.conv.weight"


class SamplesEncoder:
    """The encoder and what reads its rows. Layers are computed by what the source makes of them."""

    def __init__(self, spec: SamplesSpec, source: TowerSource) -> None:
        self._spec = spec
        has_conformer = spec.conformer is not None
        own_names = CONFORMER_NAMES if has_conformer else ()
        tensors = source.weights(_MARKER, (*_NAMES, *own_names))
        self._activation = find_activation(source.checkpoint, spec.activation)
        self._norm: Callable[[Tensor], Tensor] = _unchanged
        if spec.has_norm:
            self._norm = tensors.read_layer_norm(
                "audio_tower.layer_norm", spec.hidden_size, spec.norm_eps
            )
        self._convolutions = [
            _Convolution(spec, tensors, index) for index in range(len(spec.convolutions))
        ]
        size, inputs = spec.hidden_size, spec.convolutions[-1][0]
        name = "audio_tower.subsampling"
        self._input_norm: Norm | None = None
        if spec.has_input_norm:
            eps = spec.input_norm_eps
            self._input_norm = tensors.read_layer_norm(f"{name}.layer_norm", inputs, eps)
        self._input: Callable[[Tensor], Tensor] = _unchanged
        if spec.has_input_matrix:
            self._input = tensors.read_linear(f"{name}.projection", size, inputs)
        self._decoder: Callable[[Tensor], Tensor]
        if spec.decoder is None:
            self._decoder = _Outputs(spec, tensors)
        else:
            self._decoder = read_token_decoder(spec.decoder, size, tensors, source.checkpoint)
        self._conformer: ConformerStack | None = None
        if spec.conformer is not None:
            name = "audio_tower."
            self._conformer = ConformerStack(spec.conformer, tensors, source.checkpoint, name)
            return
        name = "audio_tower.encode_positions"
        names = [f"{name}.layers.{i}.conv" for i in range(spec.num_position_layers)]
        self._positions = [
            (_read_positions(spec, tensors, each), tensors.read(f"{each}.bias", size))
            for each in names or [f"{name}.conv"]
        ]
        # Layers between which there are adapters are computed one by one.
        self._num_at_once = 1 if spec.adapter_size else spec.num_layers
        firsts = range(0, spec.num_layers, self._num_at_once)
        table = None if spec.distances is None else read_distance_table(spec, tensors)
        self._layers = [
            source.make_layers(
                LayersSpec(
                    hidden_size=size,
                    intermediate_size=spec.intermediate_size,
                    num_heads=spec.num_heads,
                    head_dim=size // spec.num_heads,
                    feature_layers=(self._num_at_once,),
                    activation=spec.activation,
                    norm_eps=spec.norm_eps,
                    norms_sums=spec.norms_sums,
                    attention_scale=spec.attention_scale,
                    has_score_biases=spec.num_buckets > 0 or spec.distances is not None,
                ),
                (
                    _read_layer(spec, tensors, index, table)
                    for index in range(first, first + self._num_at_once)
                ),
            )
            for first in firsts
        ]
        self._adapters = [_Adapter(spec, tensors, index) for index in firsts if spec.adapter_size]
        self._expansion: Linear | None = None
        if spec.squeezed_rows > 1:
            self._expansion = tensors.read_linear(
                "audio_tower.upsample.projection", spec.squeezed_rows * size, size
            )

    def __call__(self, samples_1N: Tensor) -> Tensor:
        """Return the tokens [R, `TOKEN_FIELDS`], or outputs [P, O] if nothing writes tokens."""
        x_CN = samples_1N
        for convolution in self._convolutions:
            x_CN = self._activation(convolution(x_CN))
        x_PC = x_CN.T
        x_PD = self._input(x_PC if self._input_norm is None else self._input_norm(x_PC))
        if self._conformer is not None:
            return self._decoder(self._norm(self._conformer(x_PD)))
        num_rows = len(x_PD)
        x_PD = self._with_positions(x_PD)
        if self._spec.norms_sums:
            x_PD = self._norm(x_PD)
        for layers, adapter in zip_longest(self._layers, self._adapters):
            x_PD = layers(x_PD, Patches())[self._num_at_once]
            if adapter is not None:
                x_PD = x_PD + adapter(x_PD)
        if self._expansion is not None:
            x_PD = self._activation(self._expansion(x_PD)).reshape(-1, self._spec.hidden_size)
            x_PD = F.pad(x_PD, (0, 0, 0, num_rows - len(x_PD)))
        return self._decoder(x_PD if self._spec.norms_sums else self._norm(x_PD))

    def _with_positions(self, x_PD: Tensor) -> Tensor:
        """Return the means of squeezed rows with their positions."""
        spec, squeezed = self._spec, self._spec.squeezed_rows
        x_DP = F.pad(x_PD.T, (0, max(0, squeezed - len(x_PD))))
        means_DP = x_DP if squeezed == 1 else F.avg_pool1d(x_DP[None], squeezed)[0]
        padding = spec.position_rows // 2
        for weight, bias in self._positions:
            x_DP = F.conv1d(x_DP[None], weight, bias, squeezed, padding, 1, spec.position_groups)[0]
            # A kernel of even size makes one row too many.
            x_DP = x_DP[:, : means_DP.shape[1]]
            if spec.num_position_layers:
                x_DP = F.layer_norm(x_DP.T, x_DP.shape[:1]).T
            x_DP = self._activation(x_DP)
        x_PD = (means_DP + x_DP).T
        if spec.first_sinusoid is not None:
            places = torch.arange(len(x_PD)) + spec.first_sinusoid
            x_PD = x_PD + sinusoids(places, x_PD.shape[1]).to(x_PD)
        return x_PD


def _unchanged(x: Tensor) -> Tensor:
    return x


class _Outputs:
    """The gated convolutions after the layers, and the matrix that makes outputs of rows."""

    def __init__(self, spec: SamplesSpec, tensors: VisionWeights) -> None:
        size, convolutions = spec.hidden_size, spec.last_convolutions
        self._steps: list[Callable[[Tensor], Tensor]] = []
        if convolutions is not None:
            if spec.last_size != size:
                self._steps.append(tensors.read_linear("adapter.proj", spec.last_size, size))
                norm = tensors.read_layer_norm(
                    "adapter.proj_layer_norm", spec.last_size, _CONV_NORM_EPS
                )
                self._steps.append(norm)
            size = spec.last_size
            for index in range(convolutions.count):
                self._steps.append(_Gated(convolutions, tensors, f"adapter.layers.{index}", size))
        if spec.has_projection:
            self._steps.append(tensors.read_linear("multi_modal_projector", spec.output_size, size))

    def __call__(self, x_PD: Tensor) -> Tensor:
        """Return the outputs [P, O]."""
        for step in self._steps:
            x_PD = step(x_PD)
        return x_PD


class _Gated:
    """A gated convolution over rows."""

    def __init__(self, spec: Convolutions, tensors: VisionWeights, prefix: str, size: int) -> None:
        self._stride, self._padding = spec.stride, spec.padding
        self._weight = tensors.read(f"{prefix}.conv.weight", 2 * size, size, spec.kernel_size)
        self._bias = tensors.read(f"{prefix}.conv.bias", 2 * size)

    def __call__(self, x_PD: Tensor) -> Tensor:
        """Return fewer rows [P, D]."""
        x_DP = F.conv1d(x_PD.T[None], self._weight, self._bias, self._stride, self._padding)[0]
        return F.glu(x_DP, 0).T


class _Convolution:
    """A convolution over samples or the outputs of another, and its norm."""

    def __init__(self, spec: SamplesSpec, tensors: VisionWeights, index: int) -> None:
        channels, kernel_size, self._stride = spec.convolutions[index]
        inputs = spec.convolutions[index - 1][0] if index else 1
        name = f"audio_tower.subsampling.conv_layers.{index}"
        self._weight = tensors.read(f"{name}.conv.weight", channels, inputs, kernel_size)
        self._bias: Tensor | None = None
        if spec.has_conv_bias:
            self._bias = tensors.read(f"{name}.conv.bias", channels)
        self._is_layer_normed = spec.conv_norm == "layer"
        self._norm: Norm | None = None
        if self._is_layer_normed or index == 0:
            self._norm = tensors.read_layer_norm(f"{name}.layer_norm", channels, _CONV_NORM_EPS)

    def __call__(self, x_CN: Tensor) -> Tensor:
        """Return the normed outputs [C, N]."""
        x_CN = F.conv1d(x_CN[None], self._weight, self._bias, self._stride)[0]
        if self._norm is None:
            return x_CN
        if self._is_layer_normed:
            return self._norm(x_CN.T).T
        norm = self._norm
        return F.group_norm(x_CN[None], len(x_CN), norm.weight, norm.bias, norm.eps)[0]


class _Adapter:
    """The MLP after a layer, which is that of a language."""

    def __init__(self, spec: SamplesSpec, tensors: VisionWeights, index: int) -> None:
        size, inner = spec.hidden_size, spec.adapter_size
        prefix = f"audio_tower.layers.{index}.adapter_layer"
        self._norm = tensors.read_layer_norm(f"{prefix}.norm", size, _CONV_NORM_EPS)
        self._up = tensors.read_linear(f"{prefix}.linear_1", inner, size)
        self._down = tensors.read_linear(f"{prefix}.linear_2", size, inner)

    def __call__(self, x_PD: Tensor) -> Tensor:
        """Return what is added to the outputs [P, D] of the layer."""
        return self._down(self._up(self._norm(x_PD)).relu())


def _read_positions(spec: SamplesSpec, tensors: VisionWeights, convolution: str) -> Tensor:
    """Return the weights of a convolution that makes positions, which may be stored as directions and lengths."""
    name, size = f"{convolution}.weight", spec.hidden_size
    shape = size, size // spec.position_groups, spec.position_rows
    if f"{name}_v" not in tensors:
        return tensors.read(name, *shape)
    lengths = tensors.read(f"{name}_g", 1, 1, spec.position_rows)
    directions = tensors.read(f"{name}_v", *shape)
    norms: Tensor = torch.linalg.vector_norm(directions, dim=(0, 1), keepdim=True)
    return directions * (lengths / norms)


class _GatedBuckets:
    """Biases of scores for ranges of distances, which each head multiplies by a number that its inputs make."""

    def __init__(self, spec: SamplesSpec, tensors: VisionWeights, prefix: str) -> None:
        self._spec = spec
        head_dim = spec.hidden_size // spec.num_heads
        name = "audio_tower.layers.0.attention.rel_attn_embed.weight"
        self._biases_BH = tensors.read(name, spec.num_buckets, spec.num_heads)
        self._gates = tensors.read_linear(f"{prefix}gru_rel_pos_linear", 8, head_dim)
        self._factors_H1 = tensors.read(f"{prefix}gru_rel_pos_const", spec.num_heads)[:, None]

    def __call__(self, x_PD: Tensor) -> Tensor:
        """Return the biases [H, P, P]."""
        spec = self._spec
        gates_PH8 = self._gates(x_PD.unflatten(1, (spec.num_heads, -1)))
        first_HP, second_HP = (
            gates_PH8.unflatten(2, (2, 4)).sum(3).sigmoid().transpose(0, 1).unbind(2)
        )
        factors_HP = first_HP * (second_HP * self._factors_H1 - 1) + 2
        rows = torch.arange(len(x_PD), device=x_PD.device)
        buckets_PP = distance_buckets(
            rows - rows[:, None], spec.num_buckets, spec.max_distance, is_causal=False
        )
        biases_HPP: Tensor = self._biases_BH[buckets_PP].permute(2, 0, 1)
        gated_HPP: Tensor = factors_HP[:, :, None] * biases_HPP
        return gated_HPP


def _read_layer(
    spec: SamplesSpec, tensors: VisionWeights, index: int, table: Tensor | None
) -> LayerWeights:
    size, inner, prefix = spec.hidden_size, spec.intermediate_size, f"audio_tower.layers.{index}."
    qkv = [tensors.read_linear(f"{prefix}attention.{x}_proj", size, size) for x in "qkv"]
    score_bias: Callable[[Tensor], Tensor] | None = None
    if spec.num_buckets:
        score_bias = _GatedBuckets(spec, tensors, f"{prefix}attention.")
    elif table is not None:
        score_bias = LayerDistances(spec, table, qkv[0], qkv[1])
    return LayerWeights(
        attention_norm=tensors.read_layer_norm(f"{prefix}layer_norm", size, spec.norm_eps),
        qkv=[Linear.join(qkv)],
        output=tensors.read_linear(f"{prefix}attention.out_proj", size, size),
        mlp_norm=tensors.read_layer_norm(f"{prefix}final_layer_norm", size, spec.norm_eps),
        gate=None,
        up=tensors.read_linear(f"{prefix}feed_forward.intermediate_dense", inner, size),
        down=tensors.read_linear(f"{prefix}feed_forward.output_dense", size, inner),
        score_bias=score_bias,
    )
