"""An encoder that reads samples and attends within windows (Moonshine Streaming), in torch.

Shapes: L samples of a frame, N frames, P rows, D hidden size, H heads, K head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.config.audio.samples import StreamingSpec
from ...loaders import Checkpoint
from ..image_tower import TowerSource
from ..weights import Linear, Norm, VisionWeights, find_activation

_NORM_EPS = 1e-5
_FRAME_EPS = 1e-6
_KERNEL = 5
_MARKER = "encoder.embedder.linear.weight"


class StreamingEncoder:
    """The encoder, the positions of its outputs and their projection."""

    def __init__(self, spec: StreamingSpec, source: TowerSource) -> None:
        tensors, checkpoint = source.weights(_MARKER), source.checkpoint
        self._spec = spec
        size, name = spec.hidden_size, "encoder.embedder."
        self._scale = tensors.read(f"{name}comp.log_k", 1).exp()
        self._input = tensors.read_linear(f"{name}linear", size, spec.frame_size, has_bias=False)
        self._convolutions = [
            (
                tensors.read(f"{name}conv{number}.weight", outputs, inputs, _KERNEL),
                tensors.read(f"{name}conv{number}.bias", outputs),
            )
            for number, inputs, outputs in ((1, size, 2 * size), (2, 2 * size, size))
        ]
        self._layers = [
            _Layer(spec, tensors, checkpoint, f"encoder.layers.{index}.", window)
            for index, window in enumerate(spec.windows)
        ]
        self._norm = _read_norm(tensors, "encoder.final_norm", size)
        self._positions_PD = tensors.read("decoder.pos_emb.weight", spec.max_positions, size)
        self._output: Linear | None = None
        if spec.output_size != size:
            self._output = tensors.read_linear(
                "decoder.proj", spec.output_size, size, has_bias=False
            )

    def __call__(self, samples_1L: Tensor) -> Tensor:
        """Return the outputs [P, output size]."""
        size = self._spec.frame_size
        num_frames, rest = divmod(samples_1L.shape[1], size)
        x = samples_1L[0, : num_frames * size].view(num_frames, size)
        x = x - x.mean(1, keepdim=True)
        x = x / (x.square().mean(1, keepdim=True) + _FRAME_EPS).sqrt()
        x_DN = F.silu(self._input(torch.asinh(self._scale * x))).T
        # An incomplete frame counts, but is silent.
        x_DN = F.pad(x_DN, (0, 1 if rest else 0))
        for number, (weight, bias) in enumerate(self._convolutions):
            x_DN = F.conv1d(F.pad(x_DN, (_KERNEL - 1, 0))[None], weight, bias, stride=2)[0]
            x_DN = x_DN if number else F.silu(x_DN)
        x_PD = x_DN.T
        for layer in self._layers:
            x_PD = layer(x_PD)
        x_PD = self._norm(x_PD) + self._positions_PD[: len(x_PD)]
        return x_PD if self._output is None else self._output(x_PD)


def _read_norm(tensors: VisionWeights, name: str, size: int) -> Norm:
    """Return a layer norm whose stored weights are relative to 1."""
    weight = tensors.read(f"{name}.gamma", size) + 1
    return Norm(weight, torch.zeros_like(weight), _NORM_EPS, is_rms=False)


class _Layer:
    def __init__(
        self,
        spec: StreamingSpec,
        tensors: VisionWeights,
        checkpoint: Checkpoint,
        prefix: str,
        window: tuple[int, int],
    ) -> None:
        self._window = window
        self._head_dim = spec.head_dim
        size, inner, has_bias = spec.hidden_size, spec.intermediate_size, spec.has_bias
        rows, kv_rows = (n * spec.head_dim for n in (spec.num_heads, spec.num_kv_heads))
        self._query, self._key, self._value = (
            tensors.read_linear(f"{prefix}self_attn.{name}_proj", count, size, has_bias=has_bias)
            for name, count in (("q", rows), ("k", kv_rows), ("v", kv_rows))
        )
        self._output = tensors.read_linear(
            f"{prefix}self_attn.o_proj", size, rows, has_bias=has_bias
        )
        self._up = tensors.read_linear(f"{prefix}mlp.fc1", inner, size)
        self._down = tensors.read_linear(f"{prefix}mlp.fc2", size, inner)
        self._activation = find_activation(checkpoint, spec.activation)
        self._before_attention = _read_norm(tensors, f"{prefix}input_layernorm", size)
        self._before_mlp = _read_norm(tensors, f"{prefix}post_attention_layernorm", size)

    def __call__(self, x_PD: Tensor) -> Tensor:
        x_PD = x_PD + self._attend(self._before_attention(x_PD))
        return x_PD + self._down(self._activation(self._up(self._before_mlp(x_PD))))

    def _attend(self, x_PD: Tensor) -> Tensor:
        q_HPK, k_HPK, v_HPK = (
            linear(x_PD).unflatten(1, (-1, self._head_dim)).transpose(0, 1)
            for linear in (self._query, self._key, self._value)
        )
        rows = torch.arange(len(x_PD), device=x_PD.device)
        distance_PP = rows[:, None] - rows
        before, after = self._window
        is_seen = (distance_PP < before) & (distance_PP > -max(after, 1))
        out_HPK = F.scaled_dot_product_attention(
            q_HPK, k_HPK, v_HPK, attn_mask=is_seen, enable_gqa=True
        )
        return self._output(out_HPK.transpose(0, 1).flatten(1))
