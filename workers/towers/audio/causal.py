"""A causal encoder with a sliding window, which reads a clip part by part (Voxtral Realtime), in torch.

Shapes: C features of a frame, N frames, P rows of a part, R rows before it, D hidden size, H heads, K head dimension,
O outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.config.audio.tower import CausalSpec
from ...loaders import Checkpoint
from ..image_tower import TowerSource
from ..rotary import PatchRotary, PatchRotation
from ..weights import VisionWeights, find_activation

_MARKER: Final = "audio_tower.embedder.conv1.weight"
_KERNEL: Final = 3


class PartEncoder(ABC):
    """An encoder that reads a clip part by part, each of which continues from the state after the one before.

    Attributes:
        frames_per_output: The number of frames of an output.
    """

    frames_per_output: int

    @abstractmethod
    def __call__(self, features_CN: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the outputs [O, output size] for the frames of a clip after `state`, and the state after them.

        A state of None is that before the clip.
        """


class CausalState(NamedTuple):
    """The state of the encoder after a part of a clip, from which the next part continues.

    `frames_CN` are the last two frames, `convolved_DN` is the last output of the first convolution, and `keys_values`
    has the keys and values [2, H, R, K] in the window of each layer. There are `num_rows` rows in all.
    """

    frames_CN: Tensor
    convolved_DN: Tensor
    keys_values: list[Tensor]
    num_rows: int


class CausalEncoder(PartEncoder):
    """The encoder and the projection of its outputs."""

    def __init__(self, spec: CausalSpec, source: TowerSource) -> None:
        tensors, checkpoint = source.weights(_MARKER), source.checkpoint
        self._spec = spec
        size, output = spec.hidden_size, spec.output_size
        self._convolutions = [
            (
                tensors.read(f"audio_tower.embedder.conv{number}.weight", size, inputs, _KERNEL),
                tensors.read(f"audio_tower.embedder.conv{number}.bias", size),
            )
            for number, inputs in ((1, spec.num_mel_bins), (2, size))
        ]
        self._layers = [
            _Layer(spec, tensors, checkpoint, f"audio_tower.layers.{index}.")
            for index in range(spec.num_layers)
        ]
        self._norm = tensors.read_rms_norm("audio_tower.norm", size, spec.norm_eps)
        self._rotary = PatchRotary("sequence", spec.theta, spec.head_dim)
        name, columns = "multi_modal_projector.linear_", size * spec.rows_per_output
        self._first = tensors.read_linear(f"{name}1", output, columns, has_bias=False)
        self._second = tensors.read_linear(f"{name}2", output, output, has_bias=False)
        self._activation = find_activation(checkpoint, spec.projection_activation)
        self.frames_per_output = spec.frames_per_output

    def __call__(
        self, features_CN: Tensor, state: CausalState | None
    ) -> tuple[Tensor, CausalState]:
        """See `PartEncoder`."""
        if state is None:
            state = self._first_state(features_CN)
        (first, first_bias), (second, second_bias) = self._convolutions
        frames_CN = torch.cat((state.frames_CN, features_CN), 1)
        x_DN = F.gelu(F.conv1d(frames_CN[None], first, first_bias)[0])
        x_DN = torch.cat((state.convolved_DN, x_DN), 1)
        x_PD = F.gelu(F.conv1d(x_DN[None], second, second_bias, stride=2)[0]).T
        start, end = state.num_rows, state.num_rows + len(x_PD)
        places_P2 = torch.arange(start, end, device=x_PD.device)[:, None].expand(-1, 2)
        rotation = self._rotary.rotation(places_P2, x_PD.dtype)
        kept = []
        for layer, before in zip(self._layers, state.keys_values, strict=True):
            x_PD, keys_values = layer(x_PD, before, rotation)
            kept.append(keys_values)
        after = CausalState(frames_CN[:, 1 - _KERNEL :], x_DN[:, -1:], kept, end)
        x = self._norm(x_PD).reshape(len(x_PD) // self._spec.rows_per_output, -1)
        return self._second(self._activation(self._first(x))), after

    def _first_state(self, features_CN: Tensor) -> CausalState:
        """Return the state before a clip, which begins after silent frames."""
        spec = self._spec
        frames_CN = features_CN.new_zeros(spec.num_mel_bins, _KERNEL - 1)
        none = features_CN.new_zeros(2, spec.num_heads, 0, spec.head_dim)
        convolved_DN = features_CN.new_zeros(spec.hidden_size, 1)
        return CausalState(frames_CN, convolved_DN, [none] * spec.num_layers, 0)


class _Layer:
    def __init__(
        self, spec: CausalSpec, tensors: VisionWeights, checkpoint: Checkpoint, prefix: str
    ) -> None:
        self._spec = spec
        size, inner, rows = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
        self._query, self._key, self._value = (
            tensors.read_linear(f"{prefix}self_attn.{name}_proj", rows, size, has_bias=name != "k")
            for name in "qkv"
        )
        self._output = tensors.read_linear(f"{prefix}self_attn.o_proj", size, rows)
        self._gate, self._up = (
            tensors.read_linear(f"{prefix}mlp.{name}_proj", inner, size, has_bias=False)
            for name in ("gate", "up")
        )
        self._down = tensors.read_linear(f"{prefix}mlp.down_proj", size, inner)
        self._activation = find_activation(checkpoint, spec.activation)
        self._before_attention, self._before_mlp = (
            tensors.read_rms_norm(f"{prefix}{name}_layer_norm", size, spec.norm_eps)
            for name in ("self_attn", "final")
        )

    def __call__(
        self, x_PD: Tensor, before: Tensor, rotation: PatchRotation
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states, and the keys and values that later rows read."""
        attended_PD, keys_values = self._attend(self._before_attention(x_PD), before, rotation)
        x_PD = x_PD + attended_PD
        normed_PD = self._before_mlp(x_PD)
        gate = self._activation(self._gate(normed_PD))
        return x_PD + self._down(gate * self._up(normed_PD)), keys_values

    def _attend(
        self, x_PD: Tensor, before: Tensor, rotation: PatchRotation
    ) -> tuple[Tensor, Tensor]:
        head_dim, window = self._spec.head_dim, self._spec.window
        q, k, v = (
            linear(x_PD).unflatten(1, (-1, head_dim))
            for linear in (self._query, self._key, self._value)
        )
        out_HPK, kept = attend_window(q, k, v, before, rotation, window)
        return self._output(out_HPK.transpose(0, 1).flatten(1)), kept


def attend_window(
    q: Tensor, k: Tensor, v: Tensor, before: Tensor, rotation: PatchRotation, window: int
) -> tuple[Tensor, Tensor]:
    """Return the attention output [H, P, K] of rows within a window, and the keys and values that later rows read.

    Args:
        q: The queries [P, H, K], which are rotated.
        k: The keys.
        v: The values.
        before: The keys and values [2, H, R, K] of earlier rows.
        rotation: The rotation of queries and keys.
        window: The number of rows up to itself that a row attends to.
    """
    q_HPK = rotation.apply(q).transpose(0, 1)
    own = torch.stack((rotation.apply(k), v)).transpose(1, 2)
    keys_values = torch.cat((before, own), 2)
    rows = torch.arange(keys_values.shape[2], device=q.device)
    distance = rows[before.shape[2] :, None] - rows
    is_seen = (distance >= 0) & (distance < window)
    out_HPK = F.scaled_dot_product_attention(
        q_HPK, keys_values[0], keys_values[1], attn_mask=is_seen
    )
    # A copy, because a view would keep all rows.
    return out_HPK, keys_values[:, :, max(0, len(rows) - window + 1) :].clone()
