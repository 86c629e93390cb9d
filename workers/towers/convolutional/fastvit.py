"""A vision tower of convolutions and attention whose branches are merged (FastViT in FastVLM), in torch.

Shapes: H rows and W columns of places, C channels, N heads, P places, K head dimension.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.vision.convolutional.fastvit import (
    HEAD_DIM,
    NUM_ATTENTION_STAGES,
    FastVitSpec,
)
from ....protocol.encoder_inputs.payloads import ImagePayload
from ..image_tower import ImageTower, TowerSource, verify_square
from ..pixels import normalized_pixels
from ..weights import Linear, VisionWeights, find_activation
from .convolution import Block, Convolution, chained

_NORM_EPS: Final = 1e-5
_MARKER: Final = "stem.0.reparam_conv.weight"
_PROJECTION: Final = "multi_modal_projector."


class FastVitTower(ImageTower):
    """The tower described by `spec` and its projection."""

    def __init__(self, spec: FastVitSpec, source: TowerSource) -> None:
        super().__init__(source, spec.output_size, spec.image_size)
        self.spec = spec
        tensors = source.weights(_MARKER)
        self._steps = [*_stem(tensors, spec.sizes[0])]
        for index in range(len(spec.sizes)):
            self._steps += _stage(spec, tensors, index)
        self._steps += _last(tensors, spec.sizes[-1], spec.hidden_size)
        names = source.weights(f"{_PROJECTION}linear_1.weight")
        first, second = (
            names.read_linear(
                f"{_PROJECTION}{name}", spec.output_size, size, has_bias=spec.projection_bias
            )
            for name, size in (("linear_1", spec.hidden_size), ("linear_2", spec.output_size))
        )
        self._projection = (first, find_activation(source.checkpoint, spec.activation), second)

    def _encode(self, image: ImagePayload) -> Tensor:
        verify_square(image, self.spec.image_size)
        pixels = normalized_pixels(image, self._device, self._dtype)[0]
        features = chained(self._steps, pixels.permute(1, 2, 0).contiguous())
        return chained(self._projection, features.flatten(0, 1))


def _stem(tensors: VisionWeights, size: int) -> list[Block]:
    """Return the steps from the pixels [height, width, 3] of an image to `size` channels."""
    return [
        _convolution(tensors, "stem.0.", size, 3, 3, stride=2),
        F.gelu,
        _convolution(tensors, "stem.1.", size, 1, 3, stride=2),
        F.gelu,
        tensors.read_linear("stem.2.reparam_conv", size, size),
        F.gelu,
    ]


def _stage(spec: FastVitSpec, tensors: VisionWeights, index: int) -> list[Block]:
    """Return the steps of a stage. All but the first halve both sides."""
    size, prefix = spec.sizes[index], f"stages.{index}."
    has_attention = index >= len(spec.sizes) - NUM_ATTENTION_STAGES
    steps: list[Block] = []
    if index:
        steps += [
            _convolution(tensors, f"{prefix}downsample.proj.0.", size, 1, 7, stride=2),
            F.gelu,
            tensors.read_linear(f"{prefix}downsample.proj.1.reparam_conv", size, size),
            F.gelu,
        ]
    if has_attention:
        steps.append(_convolution(tensors, f"{prefix}pos_emb.", size, 1, 7))
    for number in range(spec.depths[index]):
        block = f"{prefix}blocks.{number}."
        if has_attention:
            steps.append(_Attention(tensors, block, size))
            steps.append(_ConvMlp(tensors, block, size, "layer_scale_2"))
        else:
            steps.append(_convolution(tensors, f"{block}token_mixer.", size, 1, 3))
            steps.append(_ConvMlp(tensors, block, size, "layer_scale"))
    return steps


def _last(tensors: VisionWeights, inputs: int, outputs: int) -> list[Block]:
    """Return the last convolution, whose channels are scaled by factors that depend on their means."""
    scale = _SqueezeExcite(tensors, "final_conv.se.", outputs)
    return [_convolution(tensors, "final_conv.", outputs, 1, 3), scale, F.gelu]


def _convolution(
    tensors: VisionWeights, prefix: str, outputs: int, inputs: int, side: int, stride: int = 1
) -> Convolution:
    weight = tensors.read(f"{prefix}reparam_conv.weight", outputs, inputs, side, side)
    bias = tensors.read(f"{prefix}reparam_conv.bias", outputs)
    return Convolution(weight, bias, stride, is_centered=True)


def _normed_convolution(tensors: VisionWeights, prefix: str, size: int, side: int) -> Convolution:
    """Return a convolution of each channel by itself, with the batch norm after it as a part of its weights."""
    weight = tensors.read(f"{prefix}conv.weight", size, 1, side, side)
    factors, bias, mean, variance = (
        tensors.read(f"{prefix}bn.{name}", size).float()
        for name in ("weight", "bias", "running_mean", "running_var")
    )
    factors = factors * (variance + _NORM_EPS).rsqrt()
    merged = weight.float() * factors[:, None, None, None]
    bias = bias - mean * factors
    return Convolution(merged.to(weight.dtype), bias.to(weight.dtype), is_centered=True)


class _ConvMlp:
    """A convolution of each channel by itself and an MLP, whose scaled result is added to its inputs."""

    def __init__(self, tensors: VisionWeights, prefix: str, size: int, scale: str) -> None:
        self._mix = _normed_convolution(tensors, f"{prefix}mlp.conv.", size, 7)
        self._up: Linear = tensors.read_linear(f"{prefix}mlp.fc1", 4 * size, size)
        self._down: Linear = tensors.read_linear(f"{prefix}mlp.fc2", size, 4 * size)
        self._down.scale_outputs(tensors.read(f"{prefix}{scale}.gamma", size))

    def __call__(self, x_HWC: Tensor) -> Tensor:
        return x_HWC + self._down(F.gelu(self._up(self._mix(x_HWC))))


class _Attention:
    """Attention between all places, whose scaled result is added to its inputs."""

    def __init__(self, tensors: VisionWeights, prefix: str, size: int) -> None:
        self._norm = tensors.read_layer_norm(f"{prefix}norm", size, _NORM_EPS)
        self._qkv: Linear = tensors.read_linear(
            f"{prefix}token_mixer.qkv", 3 * size, size, has_bias=False
        )
        self._output: Linear = tensors.read_linear(f"{prefix}token_mixer.proj", size, size)
        self._output.scale_outputs(tensors.read(f"{prefix}layer_scale_1.gamma", size))

    def __call__(self, x_HWC: Tensor) -> Tensor:
        qkv = self._qkv(self._norm(x_HWC)).flatten(0, 1)
        q_NPK, k_NPK, v_NPK = qkv.unflatten(1, (3, -1, HEAD_DIM)).permute(1, 2, 0, 3)
        out = F.scaled_dot_product_attention(q_NPK, k_NPK, v_NPK).transpose(0, 1)
        return x_HWC + self._output(out.flatten(1)).view(x_HWC.shape)


class _SqueezeExcite:
    """Factors of channels, which an MLP computes of the channels' means (arXiv 1709.01507)."""

    def __init__(self, tensors: VisionWeights, prefix: str, size: int) -> None:
        inner = size // 16
        self._down: Linear = tensors.read_linear(f"{prefix}fc1", inner, size)
        self._up: Linear = tensors.read_linear(f"{prefix}fc2", size, inner)

    def __call__(self, x_HWC: Tensor) -> Tensor:
        return x_HWC * self._up(self._down(x_HWC.mean((0, 1))).relu()).sigmoid()
