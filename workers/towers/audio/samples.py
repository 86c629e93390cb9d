"""The encoder of wav2vec 2.0 and a decoder of its rows.

Shapes: C channels, N samples or outputs of a convolution, P rows, D hidden size, R written tokens.
"""

from __future__ import annotations

from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.config.audio.samples import (
    SamplesSpec,
)
from ..image_tower import TowerSource
from ..layers import LayersSpec, LayerWeights, Patches
from ..weights import Linear, Norm, VisionWeights, find_activation
from .token_decoders import read_token_decoder

_CONV_NORM_EPS = 1e-5
_NAMES = (
    (r"^model\.", ""),
    # The names of transformers' Wav2Vec2ForCTC, whose model has the name of its kind.
    (r"^\w+\.feature_extractor\.", "audio_tower.subsampling."),
    (r"^\w+\.feature_projection\.", "audio_tower.subsampling."),
    (r"^\w+\.encoder\.pos_conv_embed\.", "audio_tower.encode_positions."),
    (r"^\w+\.encoder\.", "audio_tower."),
    (r"\.parametrizations\.weight\.original0$", ".weight_g"),
    (r"\.parametrizations\.weight\.original1$", ".weight_v"),
    (r"^lm_head\.", "ctc_head."),
)
_MARKER = "audio_tower.subsampling.projection.weight"


class SamplesEncoder:
    """The encoder and its decoder. Layers are computed by what the source makes of them."""

    def __init__(self, spec: SamplesSpec, source: TowerSource) -> None:
        self._spec = spec
        tensors = source.weights(_MARKER, _NAMES)
        self._activation = find_activation(source.checkpoint, spec.activation)
        self._convolutions = [
            _Convolution(spec, tensors, index) for index in range(len(spec.convolutions))
        ]
        size, inputs = spec.hidden_size, spec.convolutions[-1][0]
        name = "audio_tower.subsampling"
        self._input_norm: Norm | None = None
        if spec.has_input_norm:
            self._input_norm = tensors.read_layer_norm(f"{name}.layer_norm", inputs, spec.norm_eps)
        self._input = tensors.read_linear(f"{name}.projection", size, inputs)
        name = "audio_tower.encode_positions"
        names = [f"{name}.layers.{i}.conv" for i in range(spec.num_position_layers)]
        self._positions = [
            (_read_positions(spec, tensors, each), tensors.read(f"{each}.bias", size))
            for each in names or [f"{name}.conv"]
        ]
        # Layers between which there are adapters are computed one by one.
        self._num_at_once = 1 if spec.adapter_size else spec.num_layers
        firsts = range(0, spec.num_layers, self._num_at_once)
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
                ),
                (
                    _read_layer(spec, tensors, index)
                    for index in range(first, first + self._num_at_once)
                ),
            )
            for first in firsts
        ]
        self._adapters = [_Adapter(spec, tensors, index) for index in firsts if spec.adapter_size]
        self._norm = tensors.read_layer_norm("audio_tower.layer_norm", size, spec.norm_eps)
        self._decoder = read_token_decoder(spec.decoder, size, tensors, source.checkpoint)

    def __call__(self, samples_1N: Tensor) -> Tensor:
        """Return the tokens [R, `TOKEN_FIELDS`]."""
        x_CN = samples_1N
        for convolution in self._convolutions:
            x_CN = self._activation(convolution(x_CN))
        x_PC = x_CN.T
        x_PD = self._input(x_PC if self._input_norm is None else self._input_norm(x_PC))
        groups, padding = self._spec.position_groups, self._spec.position_rows // 2
        positions_PD = x_PD
        for weight, bias in self._positions:
            found = F.conv1d(positions_PD.T[None], weight, bias, padding=padding, groups=groups)
            # A kernel of even size makes one row too many.
            positions_PD = found[0, :, : len(x_PD)].T
            if self._spec.num_position_layers:
                positions_PD = F.layer_norm(positions_PD, positions_PD.shape[1:])
            positions_PD = self._activation(positions_PD)
        x_PD = x_PD + positions_PD
        if self._spec.norms_sums:
            x_PD = self._norm(x_PD)
        for layers, adapter in zip_longest(self._layers, self._adapters):
            x_PD = layers(x_PD, Patches())[self._num_at_once]
            if adapter is not None:
                x_PD = x_PD + adapter(x_PD)
        return self._decoder(x_PD if self._spec.norms_sums else self._norm(x_PD))


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


def _read_layer(spec: SamplesSpec, tensors: VisionWeights, index: int) -> LayerWeights:
    size, inner, prefix = spec.hidden_size, spec.intermediate_size, f"audio_tower.layers.{index}."
    qkv = (tensors.read_linear(f"{prefix}attention.{x}_proj", size, size) for x in "qkv")
    return LayerWeights(
        attention_norm=tensors.read_layer_norm(f"{prefix}layer_norm", size, spec.norm_eps),
        qkv=[Linear.join(tuple(qkv))],
        output=tensors.read_linear(f"{prefix}attention.out_proj", size, size),
        mlp_norm=tensors.read_layer_norm(f"{prefix}final_layer_norm", size, spec.norm_eps),
        gate=None,
        up=tensors.read_linear(f"{prefix}feed_forward.intermediate_dense", inner, size),
        down=tensors.read_linear(f"{prefix}feed_forward.output_dense", size, inner),
    )
