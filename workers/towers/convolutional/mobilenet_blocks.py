"""The blocks of MobileNet-V5, the network that Gemma 3n reads images with (arXiv 2404.10518 describes its blocks).

Shapes: H rows and W columns of places, C channels, N heads, K head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.vision.convolutional.mobilenet import ConvBlock
from ..weights import Linear, Norm, VisionWeights, activation
from .convolution import Block, Convolution, chained

_NORM_EPS: Final = 1e-6
_activation: Final = activation("gelu_pytorch_tanh")


class _Normed:
    """A convolution or a product with a norm after it, and an activation if `activates`."""

    def __init__(self, apply: Block, norm: Norm, *, activates: bool) -> None:
        self._apply, self._norm, self._activates = apply, norm, activates

    def scale(self, factors: Tensor) -> None:
        """Multiply the normed channels by factors."""
        self._norm.weight.mul_(factors)

    def __call__(self, x_HWC: Tensor) -> Tensor:
        x = self._norm(self._apply(x_HWC))
        return _activation(x) if self._activates else x


def read_stem(tensors: VisionWeights, size: int) -> Block:
    """Return the first convolution, from the pixels [height, width, 3] of an image to `size` channels."""
    weight = tensors.read("conv_stem.conv.weight", size, 3, 3, 3)
    stem = Convolution(weight, tensors.read("conv_stem.conv.bias", size), 2)
    return _Normed(stem, read_norm(tensors, "conv_stem.bn", size), activates=True)


def read_block(tensors: VisionWeights, prefix: str, block: ConvBlock) -> Block:
    """Return a block, which may add its inputs to its outputs."""
    kinds: dict[str, Callable[[VisionWeights, str, ConvBlock], Block]] = {
        "edge": _edge,
        "inverted": read_inverted,
        "attention": _Attention,
    }
    steps = kinds[block.kind](tensors, prefix, block)
    if not block.adds_inputs:
        return steps
    return lambda x_HWC: steps(x_HWC) + x_HWC


def read_norm(tensors: VisionWeights, name: str, size: int) -> Norm:
    """Return a norm of the channels of each place."""
    return tensors.read_rms_norm(name, size, _NORM_EPS)


def _edge(tensors: VisionWeights, prefix: str, block: ConvBlock) -> Block:
    side = block.kernels[0]
    weight = tensors.read(f"{prefix}conv_exp.weight", block.inner, block.inputs, side, side)
    first = _Normed(
        Convolution(weight, stride=block.stride),
        read_norm(tensors, f"{prefix}bn1", block.inner),
        activates=True,
    )
    second = _Normed(
        tensors.read_linear(f"{prefix}conv_pwl", block.outputs, block.inner, has_bias=False),
        read_norm(tensors, f"{prefix}bn2", block.outputs),
        activates=False,
    )
    return lambda x_HWC: second(first(x_HWC))


def read_inverted(tensors: VisionWeights, prefix: str, block: ConvBlock) -> Block:
    """Return the steps of an "inverted" block, without adding the inputs."""
    start, middle = block.kernels

    def convolution(name: str, size: int, side: int, stride: int, *, activates: bool) -> _Normed:
        weight = tensors.read(f"{prefix}{name}.conv.weight", size, 1, side, side)
        norm = read_norm(tensors, f"{prefix}{name}.bn", size)
        return _Normed(Convolution(weight, stride=stride), norm, activates=activates)

    def product(name: str, rows: int, columns: int, *, activates: bool) -> _Normed:
        linear = tensors.read_linear(f"{prefix}{name}.conv", rows, columns, has_bias=False)
        norm = read_norm(tensors, f"{prefix}{name}.bn", rows)
        return _Normed(linear, norm, activates=activates)

    steps: list[_Normed] = []
    if start:
        stride = 1 if middle else block.stride
        steps.append(convolution("dw_start", block.inputs, start, stride, activates=False))
    steps.append(product("pw_exp", block.inner, block.inputs, activates=True))
    if middle:
        steps.append(convolution("dw_mid", block.inner, middle, block.stride, activates=True))
    steps.append(product("pw_proj", block.outputs, block.inner, activates=False))
    if f"{prefix}layer_scale.gamma" in tensors:
        steps[-1].scale(tensors.read(f"{prefix}layer_scale.gamma", block.outputs))
    return lambda x_HWC: chained(steps, x_HWC)


class _Attention:
    """Attention between places, whose heads share keys and values. They may be of fewer places than the queries."""

    def __init__(self, tensors: VisionWeights, prefix: str, block: ConvBlock) -> None:
        size, head_dim = block.inputs, block.inner
        self._head_dim = head_dim
        self._norm = read_norm(tensors, f"{prefix}norm", size)
        self._query: Linear = tensors.read_linear(
            f"{prefix}attn.query.proj", block.num_heads * head_dim, size, has_bias=False
        )

        def shared(name: str) -> list[Block]:
            steps: list[Block] = []
            if block.stride > 1:
                side = block.kernels[1]
                weight = tensors.read(f"{prefix}{name}.down_conv.weight", size, 1, side, side)
                norm = read_norm(tensors, f"{prefix}{name}.norm", size)
                steps.append(
                    _Normed(Convolution(weight, stride=block.stride), norm, activates=False)
                )
            return [
                *steps,
                tensors.read_linear(f"{prefix}{name}.proj", head_dim, size, has_bias=False),
            ]

        self._key, self._value = shared("attn.key"), shared("attn.value")
        self._output: Linear = tensors.read_linear(
            f"{prefix}attn.output.proj", block.outputs, block.num_heads * head_dim, has_bias=False
        )
        self._output.scale_outputs(tensors.read(f"{prefix}layer_scale.gamma", block.outputs))

    def __call__(self, x_HWC: Tensor) -> Tensor:
        x = self._norm(x_HWC)
        q_NPK = self._query(x).flatten(0, 1).unflatten(1, (-1, self._head_dim)).transpose(0, 1)
        k_PK, v_PK = (chained(steps, x).flatten(0, 1) for steps in (self._key, self._value))
        heads = (len(q_NPK), -1, -1)
        out = F.scaled_dot_product_attention(q_NPK, k_PK.expand(heads), v_PK.expand(heads))
        return self._output(out.transpose(0, 1).flatten(1)).unflatten(0, x_HWC.shape[:2])
