"""The projection "perceiver", in which learned queries read the patches of an image in several layers.

Shapes: P patches, Q queries, D output size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.vision.spec import PerceiverSpec, VisionSpec
from ...loaders import Checkpoint
from ..weights import Linear, VisionWeights, find_activation

_PREFIX = "connector.perceiver_resampler."


def read_perceiver(
    spec: VisionSpec, checkpoint: Checkpoint, read: Callable[[str], VisionWeights]
) -> Callable[[Tensor, int], Tensor]:
    """Return the projection."""
    perceiver, size = spec.perceiver, spec.output_size
    assert perceiver is not None
    weights = read(f"{_PREFIX}latents")
    project = _GatedMlp(
        find_activation(checkpoint, perceiver.inner_activation),
        weights,
        "connector.modality_projection.",
        (spec.hidden_size, perceiver.inner_size, size),
    )
    queries_QD = weights.read(f"{_PREFIX}latents", spec.max_outputs, size)
    layers = [
        _Layer(perceiver, checkpoint, weights, f"{_PREFIX}layers.{i}.", size, spec.projection_eps)
        for i in range(perceiver.num_layers)
    ]
    norm = weights.read_rms_norm(f"{_PREFIX}norm", size, spec.projection_eps)

    def run(x_PD: Tensor, num_columns: int) -> Tensor:
        x_PD, x_QD = project(x_PD), queries_QD
        for layer in layers:
            x_QD = layer(x_QD, x_PD)
        return norm(x_QD)

    return run


class _GatedMlp:
    def __init__(
        self,
        activation: Callable[[Tensor], Tensor],
        weights: VisionWeights,
        prefix: str,
        sizes: tuple[int, int, int],
    ) -> None:
        def read(name: str, rows: int, columns: int) -> Linear:
            return weights.read_linear(f"{prefix}{name}_proj", rows, columns, has_bias=False)

        first, inner, last = sizes
        self._activation = activation
        self._gate, self._up = (read(name, inner, first) for name in ("gate", "up"))
        self._down = read("down", last, inner)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activation(self._gate(x)) * self._up(x))


class _Layer:
    def __init__(
        self,
        spec: PerceiverSpec,
        checkpoint: Checkpoint,
        weights: VisionWeights,
        prefix: str,
        size: int,
        eps: float,
    ) -> None:
        self._norm_queries, self._norm_patches, self._norm_mlp = (
            weights.read_rms_norm(f"{prefix}{name}", size, eps)
            for name in ("input_latents_norm", "input_context_norm", "post_attention_layernorm")
        )

        def read(name: str, rows: int, columns: int) -> Linear:
            return weights.read_linear(
                f"{prefix}self_attn.{name}_proj", rows, columns, has_bias=False
            )

        attended = spec.num_heads * spec.head_dim
        self._head_dim, self._copies = spec.head_dim, spec.num_heads // spec.num_kv_heads
        self._q, self._output = read("q", attended, size), read("o", size, attended)
        self._k, self._v = (read(name, spec.num_kv_heads * spec.head_dim, size) for name in "kv")
        activation = find_activation(checkpoint, spec.activation)
        self._mlp = _GatedMlp(activation, weights, f"{prefix}mlp.", (size, 4 * size, size))

    def __call__(self, x_QD: Tensor, x_PD: Tensor) -> Tensor:
        normed_QD = self._norm_queries(x_QD)
        seen = torch.cat((self._norm_patches(x_PD), normed_QD))
        q, k, v = (
            part.unflatten(-1, (-1, self._head_dim)).transpose(0, 1)
            for part in (self._q(normed_QD), self._k(seen), self._v(seen))
        )
        k, v = (part.repeat_interleave(self._copies, 0) for part in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        x_QD = x_QD + self._output(attended)
        return x_QD + self._mlp(self._norm_mlp(x_QD))
