"""The conformer of the Universal Speech Model (Gemma 3n and Gemma 4), in torch.

Shapes: C features of a frame, N frames, T frames after a convolution, E their features, S channels of a convolution, P
rows, D hidden size, H heads, A head dimension, F distances, K outputs.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.config.audio.tower import FixedOutputs, UniversalSpeechSpec
from ..image_tower import TowerSource
from ..weights import Linear, Norm, VisionWeights
from .stems import sinusoids

_ROW_NORM_EPS = 1e-6
_STEM = "audio_tower.subsample_conv_projection."
_MARKER = f"{_STEM}conv_0.conv.weight"


class UniversalSpeech:
    """The conformer and the projection of its outputs."""

    def __init__(self, spec: UniversalSpeechSpec, source: TowerSource) -> None:
        tensors = source.weights(_MARKER, spec.tensor_names)
        self._spec = spec
        self._convolutions: list[tuple[Tensor, Tensor]] = []
        num_features = spec.num_mel_bins
        for index, (inputs, outputs) in enumerate(pairwise((1, *spec.conv_channels))):
            name = f"{_STEM}conv_{index}."
            weight = tensors.read(f"{name}conv.weight", outputs, inputs, 3, 3)
            self._convolutions.append((weight, tensors.read(f"{name}norm.weight", outputs)))
            num_features = (num_features + 1) // 2
        self._input = tensors.read_linear(
            f"{_STEM}input_proj_linear",
            spec.hidden_size,
            num_features * spec.conv_channels[1],
            has_bias=False,
        )
        self._layers = [
            _Layer(spec, tensors, f"audio_tower.conformer.{index}.")
            for index in range(spec.num_layers)
        ]
        size = spec.hidden_size
        self._output: Linear | None = None
        if spec.projection_size:
            size = spec.projection_size
            self._output = tensors.read_linear("audio_tower.output_proj", size, spec.hidden_size)
        self._projection = tensors.read_linear(
            "embed_audio.embedding_projection", spec.output_size, size, has_bias=False
        )
        self._fixed: _FixedOutputs | None = None
        if spec.fixed is not None:
            self._fixed = _FixedOutputs(spec, spec.fixed, self._projection, tensors)

    def __call__(self, features_CN: Tensor) -> Tensor:
        """Return the outputs [K, output size]."""
        spec = self._spec
        x = features_CN.T[None]
        for weight, norm in self._convolutions:
            x = self._convolve(x, weight, norm)
        x_PD = self._input(x.permute(1, 2, 0).flatten(1))
        for layer in self._layers:
            x_PD = layer(x_PD)
        x_KD = x_PD[:: spec.rows_per_output]
        if self._output is not None:
            x_KD = self._output(x_KD)
        if self._fixed is not None:
            return self._fixed(x_KD)
        return self._projection(F.rms_norm(x_KD, x_KD.shape[1:], None, spec.norm_eps))

    def _convolve(self, x_SNC: Tensor, weight: Tensor, norm_weight: Tensor) -> Tensor:
        """Return the output [channels, frames, features] of a convolution, its norm and its activation."""
        spec = self._spec
        is_cumulative = spec.fixed is not None
        frames = (0, 2) if is_cumulative else (1, 1)
        x_SNC = F.pad(x_SNC, (1, 1, *frames))
        x_TES = F.conv2d(x_SNC[None], weight, stride=2)[0].permute(1, 2, 0)
        if is_cumulative:
            x_TES = _norm_cumulatively(x_TES, spec.conv_norm_eps) * norm_weight
        else:
            x_TES = F.layer_norm(x_TES, norm_weight.shape, norm_weight, None, spec.conv_norm_eps)
        return F.relu(x_TES).permute(2, 0, 1)


def _norm_cumulatively(x_TES: Tensor, eps: float) -> Tensor:
    """Return each frame normed with the mean and the variance of all frames up to it."""
    x = x_TES.float()
    counts = torch.arange(1, len(x) + 1, device=x.device) * (x.shape[1] * x.shape[2])
    mean_T = x.sum((1, 2)).cumsum(0) / counts
    x = x - mean_T[:, None, None]
    # The variance sums deviations from the mean of each frame's own past.
    variance_T = x.square().sum((1, 2)).cumsum(0) / counts
    return (x * torch.rsqrt(variance_T + eps)[:, None, None]).to(x_TES.dtype)


class _Layer:
    def __init__(self, spec: UniversalSpeechSpec, tensors: VisionWeights, prefix: str) -> None:
        self._spec = spec
        size = spec.hidden_size
        self._max_value = min(spec.max_value, torch.finfo(tensors.dtype).max)

        def linear(name: str, rows: int, columns: int = size) -> Linear:
            return tensors.read_linear(
                prefix + name, rows, columns, has_bias=False, clips=spec.clips
            )

        def norm(name: str, eps: float = _ROW_NORM_EPS) -> Norm:
            return tensors.read_rms_norm(prefix + name, size, eps)

        self._mlps = [
            (
                norm(f"{name}.pre_layer_norm"),
                linear(f"{name}.ffw_layer_1", 4 * size),
                linear(f"{name}.ffw_layer_2", size, 4 * size),
                norm(f"{name}.post_layer_norm"),
            )
            for name in ("ffw_layer_start", "ffw_layer_end")
        ]
        self._before_attention = norm("attention.pre_attn_norm")
        self._after_attention = norm("attention.post_norm")
        self._qkv = [linear(f"attention.attn.{name}_proj", size) for name in "qkv"]
        self._post = linear("attention.post", size)
        head_dim = size // spec.num_heads
        scale_A = tensors.read(f"{prefix}attention.attn.per_dim_scale", head_dim)
        self._query_scale_A = F.softplus(scale_A.float()) * (head_dim**-0.5 / math.log(2))
        distances = tensors.read_linear(
            f"{prefix}attention.attn.relative_position_embedding.pos_proj",
            size,
            size,
            has_bias=False,
        )
        # Distances from those of earlier rows, which are positive, to those of later ones.
        positions_F = torch.arange(spec.rows_before, -spec.rows_after - 1, -1)
        embedded_FD = distances(sinusoids(positions_F, size).to(distances.weight)).float()
        self._distances_HFA = embedded_FD.unflatten(1, (spec.num_heads, -1)).transpose(0, 1)
        self._conv_norms = [
            norm(f"lconv1d.{name}", spec.norm_eps) for name in ("pre_layer_norm", "conv_norm")
        ]
        self._conv_start = linear("lconv1d.linear_start", 2 * size)
        self._taps = tensors.read(
            f"{prefix}lconv1d.depthwise_conv1d.weight", size, 1, spec.kernel_size
        )
        self._conv_end = linear("lconv1d.linear_end", size)
        self._norm = norm("norm")

    def __call__(self, x_PD: Tensor) -> Tensor:
        x_PD = x_PD + self._mlp(x_PD, 0)
        attended = self._post(self._attend(self._before_attention(self._clamp(x_PD))))
        x_PD = x_PD + self._after_attention(self._clamp(attended))
        x_PD = x_PD + self._convolve(x_PD)
        x_PD = x_PD + self._mlp(x_PD, 1)
        return self._norm(self._clamp(x_PD))

    def _clamp(self, x: Tensor) -> Tensor:
        return x.clamp(-self._max_value, self._max_value)

    def _mlp(self, x_PD: Tensor, index: int) -> Tensor:
        before, up, down, after = self._mlps[index]
        x_PD = self._clamp(down(F.silu(up(before(self._clamp(x_PD))))))
        return after(x_PD) * self._spec.residual_weight

    def _attend(self, x_PD: Tensor) -> Tensor:
        spec = self._spec
        # As in transformers, attention is computed in float32, whatever the dtype of the rows.
        q, k, v = (
            linear(x_PD).float().unflatten(1, (spec.num_heads, -1)).transpose(0, 1)
            for linear in self._qkv
        )
        q_HPA, k_HPA = q * self._query_scale_A, k * spec.key_scale
        rows = torch.arange(len(x_PD), device=x_PD.device)
        index_PP = spec.rows_before - rows[:, None] + rows
        num_distances = self._distances_HFA.shape[1]
        is_seen = (index_PP >= 0) & (index_PP < num_distances)
        index_PP = index_PP.clamp(0, num_distances - 1)
        near_HPF = q_HPA @ self._distances_HFA.transpose(1, 2)
        near_HPP = near_HPF.gather(2, index_PP.expand(len(near_HPF), -1, -1))
        scores = ((q_HPA @ k_HPA.transpose(1, 2) + near_HPP) / spec.score_cap).tanh()
        scores = (scores * spec.score_cap).masked_fill(~is_seen, -torch.inf)
        out_HPA = scores.softmax(-1) @ v
        return out_HPA.transpose(0, 1).flatten(1).to(x_PD.dtype)

    def _convolve(self, x_PD: Tensor) -> Tensor:
        before, after = self._conv_norms
        x_DP = F.glu(self._conv_start(before(x_PD)), 1).T
        x_DP = F.pad(x_DP, (self._spec.kernel_size - 1, 0))
        x_DP = F.conv1d(x_DP[None], self._taps, groups=len(self._taps))[0]
        return self._conv_end(F.silu(after(self._clamp(x_DP.T))))


class _FixedOutputs:
    """The norms of outputs, the filler of missing outputs, and the embedding of the token after a clip."""

    def __init__(
        self,
        spec: UniversalSpeechSpec,
        fixed: FixedOutputs,
        projection: Linear,
        tensors: VisionWeights,
    ) -> None:
        size, eps = spec.hidden_size, spec.norm_eps
        self._num_outputs, self._eps = fixed.num_outputs, eps
        self._projection = projection
        self._norm = tensors.read_rms_norm("embed_audio.soft_embedding_norm", size, eps)
        norm = tensors.read_rms_norm("embed_audio.hard_embedding_norm", size, eps)
        rows = [fixed.vocab_size - 1, fixed.end_row]
        table = tensors.read_rows("embed_audio.embedding.weight", rows, fixed.vocab_size, size)
        self._filler, self._end = self._project(norm(table)).split(1)

    def __call__(self, x_KD: Tensor) -> Tensor:
        missing = self._num_outputs - len(x_KD)
        outputs = self._project(self._norm(x_KD))
        return torch.cat((outputs, self._filler.expand(missing, -1), self._end))

    def _project(self, x_KD: Tensor) -> Tensor:
        x = self._projection(x_KD)
        return F.rms_norm(x, x.shape[1:], None, self._eps)
