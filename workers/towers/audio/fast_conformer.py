"""A Fast Conformer (Canary), with a projection of its outputs (Cohere Transcribe) or a decoder (Parakeet), in torch.

Shapes: C features of a frame, N frames, P rows, D hidden size, H heads, K head dimension, F distances.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.config.audio.tower import (
    FastConformerSpec,
)
from ...loaders import Checkpoint
from ..image_tower import TowerSource
from ..weights import Linear, VisionWeights, activation, find_activation
from .conformer import read_batch_norm
from .token_decoders import TokenDecoder, read_token_decoder

_NORM_EPS = 1e-5
_MAX_WAVELENGTH = 10_000.0
_MARKER = "encoder.subsampling.linear.weight"


class FastConformer:
    """The conformer and the projection, if there is one."""

    def __init__(self, spec: FastConformerSpec, source: TowerSource) -> None:
        tensors, checkpoint = source.weights(_MARKER, spec.tensor_names), source.checkpoint
        self._spec = spec
        self._convolutions: list[tuple[Tensor, Tensor, int, bool]] = []
        channels = spec.conv_channels

        def convolution(index: int, inputs: int, kernel: int, groups: int = 1) -> None:
            name = f"encoder.subsampling.layers.{index}"
            weight = tensors.read(f"{name}.weight", channels, inputs, kernel, kernel)
            bias = tensors.read(f"{name}.bias", channels)
            # Depthwise convolutions are followed by one with a kernel of 1, and no activation.
            self._convolutions.append((weight, bias, groups, groups == 1))

        convolution(0, 1, 3)
        for number in range(spec.num_halvings - 1):
            convolution(3 * number + 2, 1, 3, channels)
            convolution(3 * number + 3, channels, 1)
        num_features = spec.num_mel_bins >> spec.num_halvings
        self._input = tensors.read_linear(
            "encoder.subsampling.linear", spec.hidden_size, channels * num_features
        )
        self._layers = [
            _Layer(spec, tensors, checkpoint, f"encoder.layers.{index}.")
            for index in range(spec.num_layers)
        ]
        self._output: Callable[[Tensor], Tensor] | None = None
        if spec.projection_size:
            self._output = _Projection(spec, tensors)
        elif spec.has_projection:
            self._output = tensors.read_linear("decoder.proj", spec.output_size, spec.hidden_size)
        self._decoder: TokenDecoder | None = None
        if spec.decoder is not None:
            size = spec.hidden_size
            self._decoder = read_token_decoder(spec.decoder, size, tensors, checkpoint)

    def __call__(self, features_CN: Tensor) -> Tensor:
        """Return the outputs [P, output size], or with a decoder the tokens [R, `TOKEN_FIELDS`]."""
        x = features_CN.T[None, None]
        for weight, bias, groups, is_activated in self._convolutions:
            is_pointwise = weight.shape[-1] == 1
            stride, padding = (1, 0) if is_pointwise else (2, 1)
            x = F.conv2d(x, weight, bias, stride, padding, groups=groups)
            x = F.relu(x) if is_activated else x
        x_PD = self._input(x[0].transpose(0, 1).flatten(1)) * self._spec.input_scale
        num_read = len(x_PD)
        if self._spec.num_outputs(features_CN.shape[1]) > num_read:
            # The last row is that of features which are 0 after each convolution.
            zeros_D = torch.zeros_like(x_PD[:1])
            bias_D = zeros_D if self._input.bias is None else self._input.bias[None]
            x_PD = torch.cat((x_PD, bias_D * self._spec.input_scale))
        positions_FD = distance_embeddings(len(x_PD), self._spec.hidden_size).to(x_PD)
        for layer in self._layers:
            x_PD = layer(x_PD, positions_FD, num_read)
        if self._decoder is not None:
            return self._decoder(x_PD)
        return x_PD if self._output is None else self._output(x_PD)


def distance_embeddings(num_rows: int, size: int) -> Tensor:
    """Return the embeddings [F, size] of distances from `num_rows` - 1 down to 1 - `num_rows`."""
    distances = torch.arange(num_rows - 1, -num_rows, -1).float()
    frequencies = 1.0 / _MAX_WAVELENGTH ** (torch.arange(0, size, 2).float() / size)
    angles = distances[:, None] * frequencies
    return torch.stack((angles.sin(), angles.cos()), 2).flatten(1)


def attend_by_distance(
    qkv: Sequence[Tensor],
    distances_FD: Tensor,
    content_H1K: Tensor,
    position_H1K: Tensor,
    *,
    num_read: int,
) -> Tensor:
    """Return the attention output [P, D] of rows whose scores depend on their distances (arXiv 1901.02860).

    Args:
        qkv: The queries, keys and values [P, D].
        distances_FD: The keys of the distances in the order of `distance_embeddings`.
        content_H1K: What is added to the queries of keys.
        position_H1K: What is added to the queries of distances.
        num_read: The number of rows that other rows read. The others read all rows alike.
    """
    heads = (len(content_H1K), -1)
    q_HPK, k_HPK, v_HPK = (x.unflatten(1, heads).transpose(0, 1) for x in qkv)
    distances_HFK = distances_FD.unflatten(1, heads).transpose(0, 1)
    near_HPF = (q_HPK + position_H1K) @ distances_HFK.transpose(1, 2)
    num_rows = q_HPK.shape[1]
    rows = torch.arange(num_rows, device=q_HPK.device)
    index_PP = num_rows - 1 - rows[:, None] + rows
    near_HPP = near_HPF.gather(2, index_PP.expand(len(near_HPF), -1, -1))
    scores_HPP = near_HPP * q_HPK.shape[2] ** -0.5
    unread = torch.finfo(scores_HPP.dtype).min
    scores_HPP[:, num_read:] = unread
    scores_HPP[:, :, num_read:] = unread
    out_HPK = F.scaled_dot_product_attention(
        q_HPK + content_H1K, k_HPK, v_HPK, attn_mask=scores_HPP
    )
    return out_HPK.transpose(0, 1).flatten(1)


class _Projection:
    """A norm and two matrices."""

    def __init__(self, spec: FastConformerSpec, tensors: VisionWeights) -> None:
        size, inner = spec.hidden_size, spec.projection_size
        has_bias = spec.has_projection_bias
        kind: Literal["rms", "layer"] = "rms" if spec.projection_activation == "relu2" else "layer"
        self._norm = tensors.read_norm("projection.norm", size, kind, _NORM_EPS)
        self._first = tensors.read_linear("projection.linear1", inner, size, has_bias=has_bias)
        self._second = tensors.read_linear(
            "projection.linear2", spec.output_size, inner, has_bias=has_bias
        )
        self._activation = activation(spec.projection_activation)

    def __call__(self, x_PD: Tensor) -> Tensor:
        return self._second(self._activation(self._first(self._norm(x_PD))))


class _Layer:
    def __init__(
        self, spec: FastConformerSpec, tensors: VisionWeights, checkpoint: Checkpoint, prefix: str
    ) -> None:
        self._spec = spec
        size, inner = spec.hidden_size, spec.intermediate_size

        def linear(name: str, rows: int, columns: int, *, has_bias: bool = spec.has_bias) -> Linear:
            return tensors.read_linear(prefix + name, rows, columns, has_bias=has_bias)

        self._activation = find_activation(checkpoint, spec.activation)
        self._mlps = [
            (linear(f"{name}.linear1", inner, size), linear(f"{name}.linear2", size, inner))
            for name in ("feed_forward1", "feed_forward2")
        ]
        self._norms = [
            tensors.read_layer_norm(f"{prefix}norm_{name}", size, _NORM_EPS)
            for name in ("feed_forward1", "self_att", "conv", "feed_forward2", "out")
        ]
        self._qkv = [linear(f"self_attn.{name}_proj", size, size) for name in "qkv"]
        self._output = linear("self_attn.o_proj", size, size)
        self._distances = linear("self_attn.relative_k_proj", size, size, has_bias=False)
        shape = spec.num_heads, size // spec.num_heads
        self._content_H1K, self._position_H1K = (
            tensors.read(f"{prefix}self_attn.bias_{name}", *shape)[:, None] for name in "uv"
        )
        has_bias = spec.has_conv_bias
        self._up = linear("conv.pointwise_conv1", 2 * size, size, has_bias=has_bias)
        self._taps = tensors.read(f"{prefix}conv.depthwise_conv.weight", size, 1, spec.kernel_size)
        self._taps_bias: Tensor | None = None
        if has_bias:
            self._taps_bias = tensors.read(f"{prefix}conv.depthwise_conv.bias", size)
        self._batch_norm = read_batch_norm(tensors, f"{prefix}conv.norm.", size)
        self._down = linear("conv.pointwise_conv2", size, size, has_bias=has_bias)

    def __call__(self, x_PD: Tensor, positions_FD: Tensor, num_read: int) -> Tensor:
        before_first, before_attention, before_conv, before_second, last = self._norms
        x_PD = x_PD + 0.5 * self._mlp(before_first(x_PD), 0)
        x_PD = x_PD + self._attend(before_attention(x_PD), positions_FD, num_read)
        x_PD = x_PD + self._convolve(before_conv(x_PD), num_read)
        return last(x_PD + 0.5 * self._mlp(before_second(x_PD), 1))

    def _mlp(self, x_PD: Tensor, index: int) -> Tensor:
        up, down = self._mlps[index]
        return down(self._activation(up(x_PD)))

    def _attend(self, x_PD: Tensor, positions_FD: Tensor, num_read: int) -> Tensor:
        qkv = [linear(x_PD) for linear in self._qkv]
        return self._output(
            attend_by_distance(
                qkv,
                self._distances(positions_FD),
                self._content_H1K,
                self._position_H1K,
                num_read=num_read,
            )
        )

    def _convolve(self, x_PD: Tensor, num_read: int) -> Tensor:
        x_DP = F.glu(self._up(x_PD), 1).T
        x_DP[:, num_read:] = 0
        padding = (self._spec.kernel_size - 1) // 2
        x = F.conv1d(x_DP[None], self._taps, self._taps_bias, 1, padding, groups=len(self._taps))
        mean, variance, weight, bias = self._batch_norm
        x = self._activation(F.batch_norm(x, mean, variance, weight, bias, eps=_NORM_EPS))
        return self._down(x[0].T)
