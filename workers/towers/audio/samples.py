"""The encoder of wav2vec 2.0 and a decoder of its rows (OmniASR).

Shapes: C channels, N samples or outputs of a convolution, P rows, D hidden size, R written tokens.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ....protocol.config.audio.samples import (
    SamplesSpec,
)
from ..image_tower import TowerSource
from ..layers import LayersSpec, LayerWeights, Patches
from ..weights import Linear, VisionWeights, find_activation
from .token_decoders import read_token_decoder

_CONV_NORM_EPS = 1e-5
_NAMES = ((r"^model\.", ""),)
MARKER = "audio_tower.subsampling.projection.weight"


class SamplesEncoder:
    """The encoder and its decoder. Layers are computed by what the source makes of them."""

    def __init__(self, spec: SamplesSpec, source: TowerSource) -> None:
        self._spec = spec
        tensors = source.weights(MARKER, _NAMES)
        self._activation = find_activation(source.checkpoint, spec.activation)
        self._convolutions = []
        inputs = 1
        for index, (channels, kernel_size, stride) in enumerate(spec.convolutions):
            name = f"audio_tower.subsampling.conv_layers.{index}"
            weight = tensors.read(f"{name}.conv.weight", channels, inputs, kernel_size)
            bias = tensors.read(f"{name}.conv.bias", channels)
            norm = tensors.read_layer_norm(f"{name}.layer_norm", channels, _CONV_NORM_EPS)
            self._convolutions.append((weight, bias, stride, norm))
            inputs = channels
        size = spec.hidden_size
        name = "audio_tower.subsampling"
        self._input_norm = tensors.read_layer_norm(f"{name}.layer_norm", inputs, spec.norm_eps)
        self._input = tensors.read_linear(f"{name}.projection", size, inputs)
        name = "audio_tower.encode_positions.conv"
        shape = size, size // spec.position_groups, spec.position_rows
        self._positions = tensors.read(f"{name}.weight", *shape)
        self._positions_bias = tensors.read(f"{name}.bias", size)
        self._layers = source.make_layers(
            LayersSpec(
                hidden_size=size,
                intermediate_size=spec.intermediate_size,
                num_heads=spec.num_heads,
                head_dim=size // spec.num_heads,
                feature_layers=(spec.num_layers,),
                activation=spec.activation,
                norm_eps=spec.norm_eps,
            ),
            (_read_layer(spec, tensors, index) for index in range(spec.num_layers)),
        )
        self._norm = tensors.read_layer_norm("audio_tower.layer_norm", size, spec.norm_eps)
        self._decoder = read_token_decoder(spec.decoder, size, tensors, source.checkpoint)

    def __call__(self, samples_1N: Tensor) -> Tensor:
        """Return the tokens [R, `TOKEN_FIELDS`]."""
        x_CN = samples_1N
        for weight, bias, stride, norm in self._convolutions:
            x_CN = F.conv1d(x_CN[None], weight, bias, stride)[0]
            x_CN = self._activation(norm(x_CN.T)).T
        x_PD = self._input(self._input_norm(x_CN.T))
        groups, padding = self._spec.position_groups, self._spec.position_rows // 2
        positions = F.conv1d(
            x_PD.T[None], self._positions, self._positions_bias, padding=padding, groups=groups
        )
        # A kernel of even size makes one row too many.
        x_PD = x_PD + self._activation(positions[0, :, :-1]).T
        x_PD = self._layers(x_PD, Patches())[self._spec.num_layers]
        return self._decoder(self._norm(x_PD))


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
