"""Transformer layers over patches of features (MiDashengLM), in torch.

Shapes: C features of a frame, N frames, P patches, D hidden size.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.config.audio.tower import PatchesSpec
from ..weights import Linear, VisionWeights

MARKER: Final = "audio_encoder.patch_embed.proj.weight"
_NORM_EPS: Final = 1e-6
_INPUT_NORM_EPS: Final = 1e-5


class PatchEncoder:
    """The layers and the projection that `spec` describes."""

    def __init__(self, spec: PatchesSpec, tensors: VisionWeights) -> None:
        self._spec = spec
        size, count, prefix = spec.hidden_size, spec.num_mel_bins, "audio_encoder."
        scale, bias, mean, variance = (
            tensors.read(f"{prefix}init_bn.{name}", count)
            for name in ("weight", "bias", "running_mean", "running_var")
        )
        scale = scale * (variance + _INPUT_NORM_EPS).rsqrt()
        self._scale_C1, self._shift_C1 = scale[:, None], (bias - mean * scale)[:, None]
        patch = tensors.read(
            f"{prefix}patch_embed.proj.weight", size, 1, count, spec.frames_per_patch
        )
        bias = tensors.read(f"{prefix}patch_embed.proj.bias", size)
        self._patch = Linear(patch.flatten(1), bias)
        times = tensors.read(f"{prefix}time_pos_embed", 1, size, 1, spec.window)
        heights = tensors.read(f"{prefix}freq_pos_embed", 1, size, 1, 1)
        self._positions_PD = (times + heights)[0, :, 0].T
        self._layers = [
            _Layer(spec, tensors, f"{prefix}blocks.{index}.") for index in range(spec.num_layers)
        ]
        self._norm = tensors.read_layer_norm(f"{prefix}norm", size, _NORM_EPS)
        rows = spec.patches_per_output
        self._first = tensors.read_linear("audio_projector.net.0", spec.output_size, rows * size)
        self._second = tensors.read_linear(
            "audio_projector.net.2", spec.output_size, spec.output_size
        )

    def __call__(self, features_CN: Tensor) -> Tensor:
        """Return the outputs [outputs, output size]."""
        spec = self._spec
        num_patches, rest = divmod(features_CN.shape[1], spec.frames_per_patch)
        x_CN = features_CN * self._scale_C1 + self._shift_C1
        x_CN = x_CN[:, : num_patches * spec.frames_per_patch]
        patches = x_CN.unflatten(1, (-1, spec.frames_per_patch)).transpose(0, 1)
        x_PD = self._patch(patches.flatten(1))
        # The first frame begins before the clip. So the frames of one patch more than the samples fill are complete.
        has_last = rest > 0
        outputs = []
        for start in range(0, num_patches, spec.window):
            part_PD = x_PD[start : start + spec.window]
            part_PD = part_PD + self._positions_PD[: len(part_PD)]
            is_seen: Tensor | None = None
            if start + len(part_PD) == num_patches and not has_last and len(part_PD) > 1:
                is_seen = torch.arange(len(part_PD), device=part_PD.device) < len(part_PD) - 1
            for layer in self._layers:
                part_PD = layer(part_PD, is_seen)
            outputs.append(self._norm(part_PD))
        x_PD = torch.cat(outputs)
        rows = spec.patches_per_output
        joined = x_PD[: len(x_PD) // rows * rows].reshape(-1, rows * x_PD.shape[1])
        return self._second(F.gelu(self._first(joined)))


class _Layer:
    def __init__(self, spec: PatchesSpec, tensors: VisionWeights, prefix: str) -> None:
        size, inner = spec.hidden_size, spec.intermediate_size
        self._num_heads = spec.num_heads
        self._before_attention, self._before_mlp = (
            tensors.read_layer_norm(f"{prefix}norm{number}", size, _NORM_EPS) for number in (1, 2)
        )
        self._qkv = tensors.read_linear(
            f"{prefix}attn.qkv", 3 * size, size, has_bias=spec.has_qkv_bias
        )
        self._output = tensors.read_linear(f"{prefix}attn.proj", size, size)
        self._up = tensors.read_linear(f"{prefix}mlp.fc1", inner, size)
        self._down = tensors.read_linear(f"{prefix}mlp.fc2", size, inner)
        if spec.has_layer_scale:
            for number, linear in ((1, self._output), (2, self._down)):
                linear.scale_outputs(tensors.read(f"{prefix}ls{number}.gamma", size))

    def __call__(self, x_PD: Tensor, is_seen: Tensor | None) -> Tensor:
        """Return the hidden states. Patches attend to those that are seen; None for all."""
        q, k, v = (
            x.unflatten(1, (self._num_heads, -1)).transpose(0, 1)
            for x in self._qkv(self._before_attention(x_PD)).chunk(3, 1)
        )
        mask = None if is_seen is None else is_seen.expand(len(x_PD), -1)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x_PD = x_PD + self._output(attended.transpose(0, 1).flatten(1))
        return x_PD + self._down(F.gelu(self._up(self._before_mlp(x_PD))))
