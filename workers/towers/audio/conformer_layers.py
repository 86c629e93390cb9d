"""The layers of conformers whose rows attend to all rows of a clip, in torch.

Shapes: P rows, D hidden size, H heads, K head dimension, F distances.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.config.audio.conformer_layers import ConformerLayers
from ...loaders import Checkpoint
from ..weights import Linear, Norm, VisionWeights, find_activation
from .conformer import read_batch_norm

_BATCH_NORM_EPS = 1e-5
_MAX_WAVELENGTH = 10_000.0


class ConformerStack:
    """The layers whose tensors have names that begin with `prefix`."""

    def __init__(
        self, spec: ConformerLayers, tensors: VisionWeights, checkpoint: Checkpoint, prefix: str
    ) -> None:
        self._spec = spec
        self._layers = [
            _Layer(spec, tensors, checkpoint, f"{prefix}layers.{index}.")
            for index in range(spec.num_layers)
        ]

    def __call__(self, x_PD: Tensor, num_read: int | None = None) -> Tensor:
        """Return the outputs [P, D]. Of the rows, `num_read` (None: all) are read by other rows."""
        places = self._places(len(x_PD)).to(x_PD.device)
        if self._spec.positions != "keys":
            places = places.to(x_PD.dtype)
        for layer in self._layers:
            x_PD = layer(x_PD, places, len(x_PD) if num_read is None else num_read)
        return x_PD

    def _places(self, num_rows: int) -> Tensor:
        """Return the embeddings of distances, their indices [P, P], or the cosines and sines [2, P, 1, K / 2]."""
        spec = self._spec
        if spec.positions == "distances":
            return distance_embeddings(num_rows, spec.hidden_size)
        rows_P = torch.arange(num_rows)
        if spec.positions == "keys":
            distances_PP = rows_P - rows_P[:, None]
            return distances_PP.clamp(-spec.num_before, spec.num_after) + spec.num_before
        size = spec.hidden_size // spec.num_heads
        frequencies = spec.theta ** (torch.arange(0, size, 2) / -size)
        angles = rows_P[:, None, None] * frequencies
        return torch.stack((angles.cos(), angles.sin()))


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


class _Layer:
    def __init__(
        self, spec: ConformerLayers, tensors: VisionWeights, checkpoint: Checkpoint, prefix: str
    ) -> None:
        self._spec = spec
        size, inner = spec.hidden_size, spec.intermediate_size
        head_dim, channels = size // spec.num_heads, spec.conv_expansion * size

        def linear(name: str, rows: int, columns: int, *, has_bias: bool = spec.has_bias) -> Linear:
            return tensors.read_linear(prefix + name, rows, columns, has_bias=has_bias)

        def norm(name: str, size: int = size) -> Norm:
            return tensors.read_layer_norm(
                prefix + name, size, spec.norm_eps, has_bias=spec.has_norm_bias
            )

        self._activation = find_activation(checkpoint, spec.activation)
        self._mlps = [
            (linear(f"{name}.linear1", inner, size), linear(f"{name}.linear2", size, inner))
            for name in ("feed_forward1", "feed_forward2")
        ]
        self._norms = [
            norm(f"norm_{name}") for name in ("feed_forward1", "conv", "feed_forward2", "out")
        ]
        self._attention_norms = [
            norm(f"norm_{name}") for name in ("qkv" if spec.has_qkv_norms else ("self_att",))
        ]
        has_bias = spec.has_bias and spec.has_attention_bias
        *self._qkv, self._output = (
            linear(f"self_attn.{name}_proj", size, size, has_bias=has_bias) for name in "qkvo"
        )
        if spec.positions == "distances":
            self._distances = linear("self_attn.relative_k_proj", size, size, has_bias=False)
            self._content_H1K, self._position_H1K = (
                tensors.read(f"{prefix}self_attn.bias_{name}", spec.num_heads, head_dim)[:, None]
                for name in "uv"
            )
        elif spec.positions == "keys":
            num_distances = spec.num_before + 1 + spec.num_after
            name = f"{prefix}self_attn.distance_embedding.weight"
            self._keys_FK = tensors.read(name, num_distances, head_dim)
        has_bias = spec.has_conv_bias
        self._up = linear("conv.pointwise_conv1", 2 * channels, size, has_bias=has_bias)
        self._taps = tensors.read(
            f"{prefix}conv.depthwise_conv.weight", channels, 1, spec.kernel_size
        )
        self._taps_bias: Tensor | None = None
        if has_bias:
            self._taps_bias = tensors.read(f"{prefix}conv.depthwise_conv.bias", channels)
        self._batch_norm: list[Tensor] = []
        self._conv_norm: Norm | None = None
        if spec.conv_norm == "batch":
            self._batch_norm = read_batch_norm(tensors, f"{prefix}conv.norm.", channels)
        else:
            self._conv_norm = norm("conv.norm", channels)
        self._down = linear("conv.pointwise_conv2", size, channels, has_bias=has_bias)

    def __call__(self, x_PD: Tensor, places: Tensor, num_read: int) -> Tensor:
        before_first, before_conv, before_second, last = self._norms
        kept, added = self._spec.mlp_factors
        x_PD = kept * x_PD + added * self._mlp(before_first(x_PD), 0)
        x_PD = x_PD + self._output(self._attend(x_PD, places, num_read))
        kept_rows, convolved = self._spec.conv_factors
        x_PD = kept_rows * x_PD + convolved * self._convolve(before_conv(x_PD), num_read)
        return last(kept * x_PD + added * self._mlp(before_second(x_PD), 1))

    def _mlp(self, x_PD: Tensor, index: int) -> Tensor:
        up, down = self._mlps[index]
        return down(self._activation(up(x_PD)))

    def _attend(self, x_PD: Tensor, places: Tensor, num_read: int) -> Tensor:
        kind, heads = self._spec.positions, (self._spec.num_heads, -1)
        normed = [norm(x_PD) for norm in self._attention_norms]
        inputs = normed if len(normed) == 3 else normed * 3
        if kind == "inputs":
            matched_PD = _rotated(inputs[0].unflatten(1, heads), places).flatten(1)
            inputs = [matched_PD, matched_PD, inputs[2]]
        q_PD, k_PD, v_PD = (linear(x) for linear, x in zip(self._qkv, inputs, strict=True))
        if kind == "distances":
            return attend_by_distance(
                (q_PD, k_PD, v_PD),
                self._distances(places),
                self._content_H1K,
                self._position_H1K,
                num_read=num_read,
            )
        q_PHK, k_PHK, v_PHK = (each.unflatten(1, heads) for each in (q_PD, k_PD, v_PD))
        bias_HPP: Tensor | None = None
        if kind == "rotary":
            q_PHK, k_PHK = _rotated(q_PHK, places), _rotated(k_PHK, places)
        elif kind == "keys":
            near_HPF = q_PHK.transpose(0, 1) @ self._keys_FK.T
            near_HPP = near_HPF.gather(2, places.expand(len(near_HPF), -1, -1))
            bias_HPP = near_HPP * q_PHK.shape[2] ** -0.5
        q_HPK, k_HPK, v_HPK = (each.transpose(0, 1) for each in (q_PHK, k_PHK, v_PHK))
        out_HPK = F.scaled_dot_product_attention(q_HPK, k_HPK, v_HPK, attn_mask=bias_HPP)
        return out_HPK.transpose(0, 1).flatten(1)

    def _convolve(self, x_PD: Tensor, num_read: int) -> Tensor:
        spec = self._spec
        x_DP = F.glu(self._up(x_PD), 1).T
        x_DP[:, num_read:] = 0
        before = spec.kernel_size - 1 if spec.is_causal else (spec.kernel_size - 1) // 2
        x_DP = F.pad(x_DP, (before, spec.kernel_size - 1 - before))
        x = F.conv1d(x_DP[None], self._taps, self._taps_bias, groups=len(self._taps))
        if self._conv_norm is not None:
            return self._down(self._activation(self._conv_norm(x[0].T)))
        mean, variance, weight, bias = self._batch_norm
        x = self._activation(F.batch_norm(x, mean, variance, weight, bias, eps=_BATCH_NORM_EPS))
        return self._down(x[0].T)


def _rotated(x_PHK: Tensor, turns: Tensor) -> Tensor:
    """Return heads whose first and second halves are the coordinates that the cosines and sines turn."""
    cosines, sines = turns
    first, second = x_PHK.chunk(2, 2)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), 2)
