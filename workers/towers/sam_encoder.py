"""SAM's image encoder (arXiv 2304.02643), as DeepSeek-OCR 2 and DeepSeek-VL use it.

Shapes: H rows and W columns of patches, D hidden size, N windows, S patches of a window per side, A heads, K head
dimension, C channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...protocol.checkpoint.vision.spec import SamSpec
from .weights import Linear, Norm, VisionWeights, activation

_NECK_EPS = 1e-6


class SamEncoder:
    """Turns the normalized pixels of an image into features, in torch."""

    def __init__(self, spec: SamSpec, tensors: VisionWeights) -> None:
        self.spec = spec
        size, patch, side = spec.hidden_size, spec.patch_size, spec.side
        self._patch = patch
        self._patches = tensors.read("patch_embed.projection.weight", size, 3, patch, patch)
        self._patches_bias = tensors.read("patch_embed.projection.bias", size)
        self._positions = tensors.read("pos_embed", side, side, size)
        self._layers = [
            _Layer(
                spec, tensors, f"layers.{i}.", 0 if i + 1 in spec.full_layers else spec.window_size
            )
            for i in range(spec.num_layers)
        ]
        self._neck = _Neck(spec, tensors, "neck.")
        self._early_neck: _Neck | None = None
        if spec.early_layer:
            self._early_neck = _Neck(spec, tensors, "early_neck.")
            self._early_factor_1 = tensors.read("early_factor", 1)
        self._strided = (
            tensors.read("proj.conv1.weight", spec.middle_size, spec.neck_size, 3, 3),
            tensors.read("proj.conv2.weight", spec.output_size, spec.middle_size, 3, 3),
        )

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return the features [places, C] of an image [3, height, width], with a place for 4 x 4 patches.

        If the encoder has a `feature_side`, there are that many places in each direction.
        """
        x = F.conv2d(pixels[None], self._patches, self._patches_bias, self._patch)
        x_HWD = x[0].permute(1, 2, 0)
        x_HWD = x_HWD + self._interpolated(*x_HWD.shape[:2])
        early: Tensor | None = None
        for number, layer in enumerate(self._layers, 1):
            x_HWD = layer(x_HWD)
            if self._early_neck is not None and number == self.spec.early_layer:
                early = self._reduced(self._early_neck(x_HWD))
        features = self._reduced(self._neck(x_HWD))
        return features if early is None else features + early * self._early_factor_1

    def _reduced(self, x: Tensor) -> Tensor:
        """Return the features [places, C] of the outputs [1, C, H, W] of a neck."""
        if side := 4 * self.spec.feature_side:
            x = F.interpolate(x, (side, side), mode="bilinear", align_corners=False)
        for weight in self._strided:
            x = F.conv2d(x, weight, stride=2, padding=1)
        return x[0].flatten(1).T

    def _interpolated(self, num_rows: int, num_columns: int) -> Tensor:
        """Return the learned positions [H, W, D] of a grid of patches."""
        if self._positions.shape[:2] == (num_rows, num_columns):
            return self._positions
        table = self._positions.float().permute(2, 0, 1)[None]
        size = num_rows, num_columns
        resized = F.interpolate(table, size, mode="bicubic", antialias=True)
        return resized[0].permute(1, 2, 0).to(self._positions.dtype)


class _Neck:
    """Two convolutions, each followed by a norm, that change the number of channels."""

    def __init__(self, spec: SamSpec, tensors: VisionWeights, prefix: str) -> None:
        size, neck = spec.hidden_size, spec.neck_size
        self._weights = (
            tensors.read(f"{prefix}conv1.weight", neck, size).view(neck, size, 1, 1),
            tensors.read(f"{prefix}conv2.weight", neck, neck, 3, 3),
        )
        self._norms = [
            tensors.read_layer_norm(f"{prefix}layer_norm{i}", neck, _NECK_EPS) for i in (1, 2)
        ]

    def __call__(self, x_HWD: Tensor) -> Tensor:
        """Return the channels of each patch, [1, C, H, W]."""
        x = x_HWD.permute(2, 0, 1)[None]
        for weight, norm in zip(self._weights, self._norms, strict=True):
            x = F.conv2d(x, weight, padding=weight.shape[-1] // 2)
            x = norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x


class _Layer:
    """Attention within windows of `window_size` patches per side, or between all patches if it is 0, and an MLP."""

    def __init__(
        self, spec: SamSpec, tensors: VisionWeights, prefix: str, window_size: int
    ) -> None:
        size, inner = spec.hidden_size, spec.intermediate_size
        self._num_heads, self._window_size = spec.num_heads, window_size
        self._norms: list[Norm] = [
            tensors.read_layer_norm(f"{prefix}layer_norm{i}", size, spec.norm_eps) for i in (1, 2)
        ]
        self._qkv = tensors.read_linear(f"{prefix}attn.qkv", 3 * size, size)
        self._output = tensors.read_linear(f"{prefix}attn.proj", size, size)
        num_places = 2 * (window_size or spec.side) - 1
        self._places = _Places(
            *(
                tensors.read(f"{prefix}attn.rel_pos_{axis}", num_places, size // spec.num_heads)
                for axis in "hw"
            )
        )
        self._up: Linear = tensors.read_linear(f"{prefix}mlp.lin1", inner, size)
        self._down: Linear = tensors.read_linear(f"{prefix}mlp.lin2", size, inner)
        self._activation = activation(spec.activation)

    def __call__(self, x_HWD: Tensor) -> Tensor:
        height, width, _ = x_HWD.shape
        normed, side = self._norms[0](x_HWD), self._window_size
        if not side:
            attended = self._attend(normed[None])[0]
        else:
            # The padding takes part in the attention, as keys and values of zero inputs.
            padded = F.pad(normed, (0, 0, 0, -width % side, 0, -height % side))
            rows, columns = (length // side for length in padded.shape[:2])
            windows = padded.view(rows, side, columns, side, -1).transpose(1, 2).flatten(0, 1)
            attended = self._attend(windows).view(rows, columns, side, side, -1)
            attended = attended.transpose(1, 2).flatten(2, 3).flatten(0, 1)[:height, :width]
        x_HWD = x_HWD + attended
        return x_HWD + self._down(self._activation(self._up(self._norms[1](x_HWD))))

    def _attend(self, x_NHWD: Tensor) -> Tensor:
        num_windows, height, width, _ = x_NHWD.shape
        qkv = self._qkv(x_NHWD).view(num_windows, height * width, 3, self._num_heads, -1)
        heads = []
        # One head at a time, because the scores of all patches need a lot of memory.
        for q, k, v in zip(*(part.unbind(2) for part in qkv.unbind(2)), strict=True):
            bias = self._places.scores(q, height, width)
            heads.append(F.scaled_dot_product_attention(q, k, v, attn_mask=bias))
        return self._output(torch.cat(heads, -1)).view(x_NHWD.shape)


class _Places(NamedTuple):
    """Vectors for the vertical and horizontal distances of a patch and another one, [2 * S - 1, K] each."""

    rows: Tensor
    columns: Tensor

    def scores(self, q: Tensor, height: int, width: int) -> Tensor:
        """Return what is added to the attention scores [N, H * W, H * W] of queries [N, H * W, K]."""
        grid = q.view(len(q), height, width, -1)
        vertical = torch.einsum("nhwc,hkc->nhwk", grid, _distances(self.rows, height))
        horizontal = torch.einsum("nhwc,wkc->nhwk", grid, _distances(self.columns, width))
        return (vertical[..., None] + horizontal[..., None, :]).flatten(3).flatten(1, 2)


def _distances(table: Tensor, length: int) -> Tensor:
    """Return the vectors [length, length, K] for each query and key, interpolated from a table of another length."""
    if len(table) != 2 * length - 1:
        table = F.interpolate(table.T[None], 2 * length - 1, mode="linear")[0].T
    at = torch.arange(length, device=table.device)
    return table[at[:, None] - at + length - 1]
