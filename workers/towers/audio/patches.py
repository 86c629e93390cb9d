"""Transformer layers over patches of features (MiDashengLM).

Shapes: C features of a frame, N frames, P patches, D hidden size.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.config.audio.tower import PatchesSpec
from ..image_tower import TowerSource
from ..layers import LayersSpec, LayerWeights, Patches
from ..weights import Linear, VisionWeights

_MARKER: Final = "audio_encoder.patch_embed.proj.weight"
_NORM_EPS: Final = 1e-6
_INPUT_NORM_EPS: Final = 1e-5


class PatchEncoder:
    """The layers and the projection that `spec` describes."""

    def __init__(self, spec: PatchesSpec, source: TowerSource) -> None:
        self._spec = spec
        tensors = source.weights(_MARKER)
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
        self._layers = source.make_layers(
            LayersSpec(
                hidden_size=size,
                intermediate_size=spec.intermediate_size,
                num_heads=spec.num_heads,
                head_dim=size // spec.num_heads,
                feature_layers=(spec.num_layers,),
                activation="gelu",
                norm_eps=_NORM_EPS,
            ),
            (_read_layer(spec, tensors, f"{prefix}blocks.{i}.") for i in range(spec.num_layers)),
        )
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
        frames = x_CN.unflatten(1, (-1, spec.frames_per_patch)).transpose(0, 1)
        x_PD = self._patch(frames.flatten(1))
        # The first frame begins before the clip. So the frames of one patch more than the samples fill are complete.
        has_last = rest > 0
        outputs = []
        for start in range(0, num_patches, spec.window):
            part_PD = x_PD[start : start + spec.window]
            part_PD = part_PD + self._positions_PD[: len(part_PD)]
            num_seen = len(part_PD)
            if start + num_seen == num_patches and not has_last and num_seen > 1:
                num_seen -= 1
            visible_P2 = torch.tensor([[0, num_seen]], device=part_PD.device)
            patches = Patches(visible_P2=visible_P2.expand(len(part_PD), 2).contiguous())
            [part_PD] = self._layers(part_PD, patches).values()
            outputs.append(self._norm(part_PD))
        x_PD = torch.cat(outputs)
        rows = spec.patches_per_output
        joined = x_PD[: len(x_PD) // rows * rows].reshape(-1, rows * x_PD.shape[1])
        return self._second(F.gelu(self._first(joined)))


def _read_layer(spec: PatchesSpec, tensors: VisionWeights, prefix: str) -> LayerWeights:
    size, inner = spec.hidden_size, spec.intermediate_size
    qkv = tensors.read_linear(f"{prefix}attn.qkv", 3 * size, size, has_bias=spec.has_qkv_bias)
    weights = LayerWeights(
        attention_norm=tensors.read_layer_norm(f"{prefix}norm1", size, _NORM_EPS),
        qkv=[qkv],
        output=tensors.read_linear(f"{prefix}attn.proj", size, size),
        mlp_norm=tensors.read_layer_norm(f"{prefix}norm2", size, _NORM_EPS),
        gate=None,
        up=tensors.read_linear(f"{prefix}mlp.fc1", inner, size),
        down=tensors.read_linear(f"{prefix}mlp.fc2", size, inner),
    )
    if spec.has_layer_scale:
        for number, linear in ((1, weights.output), (2, weights.down)):
            linear.scale_outputs(tensors.read(f"{prefix}ls{number}.gamma", size))
    return weights
