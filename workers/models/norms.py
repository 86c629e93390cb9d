"""The norms over the hidden size, and the residual stream that they read.

Shapes: T tokens of a step, N streams, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layers.layers import (
    AffineNorm,
    GatedNorm,
    GroupedNorm,
    HeadNorm,
    InputScaledNorm,
    LayerKernels,
    LayerNorm,
    Linear,
    RMSNorm,
)
from ..layers.spec import ModelSpec
from ..layers.specs.norm_gate import NormGateSpec
from .layer_source import LayerSource
from .weights import WeightReader


def added(
    x_TD: Tensor,
    block_TD: Tensor | None,
    spec: ModelSpec,
    norm: RMSNorm | None,
    *,
    replaces_stream: bool = False,
) -> Any:
    """Add a block's output to the residual stream in place. Return the stream, normed if there is a norm.

    If it `replaces_stream`, the norm changes the stream itself.
    """
    if norm is not None and (spec.interpolates_blocks or replaces_stream):
        if block_TD is not None:
            x_TD.add_(block_TD)
        return x_TD.copy_(norm(x_TD))
    if block_TD is None:
        return x_TD if norm is None else norm(x_TD)
    if norm is None:
        return x_TD.add_(block_TD, alpha=spec.residual_multiplier)
    return norm.add_and_norm(x_TD, block_TD, spec.residual_multiplier)


def read_norm(
    spec: ModelSpec,
    weights: WeightReader,
    name: str,
    kernels: LayerKernels,
    consumer: Linear | None = None,
) -> RMSNorm:
    """Return the norm called `name` over the hidden size."""
    size, offset = spec.hidden_size, spec.norm_offset(name)
    eps = spec.hidden_norm_eps(name)
    if spec.norm_gate is not None and spec.norm_gate.applies(name):
        return read_gated_norm(spec, spec.norm_gate, weights, name, size, eps, kernels)
    if offset is None:
        weight_D = torch.ones(size, device=weights.device)
    else:
        weight_D = weights.read_vector(f"{name}.weight", size) + offset
    if spec.scales_input(name):
        return InputScaledNorm(weight_D, eps)
    if spec.norm_groups > 1:
        return GroupedNorm(weight_D, eps, spec.norm_groups)
    if spec.norm_kind == "rms":
        return kernels.norm(weight_D, eps, consumer)
    bias_D = weights.read_vector(f"{name}.bias", size) if spec.has_norm_bias(name) else None
    kind = LayerNorm if spec.norm_kind == "layer" else AffineNorm
    return kind(weight_D, eps, bias_D)


def read_gated_norm(
    spec: ModelSpec,
    gate: NormGateSpec,
    weights: WeightReader,
    name: str,
    size: int,
    eps: float,
    kernels: LayerKernels,
    factor: float = 1.0,
) -> GatedNorm:
    """Return the norm called `name` over `size` elements, whose result is multiplied by a gate and by `factor`."""
    down, up = (
        kernels.linear(weights.read_matrix(f"{name}.gate.{part}.weight", *shape))
        for part, shape in (("down", (gate.rank, size)), ("up", (size, gate.rank)))
    )
    weight = weights.read_vector(f"{name}.weight", size)
    if offset := spec.norm_offset(name):
        weight = weight + offset
    return GatedNorm(weight, eps, down, up, gate.factor * factor)


def read_latent_norm(
    source: LayerSource, name: str, size: int, eps: float, factor: float = 1.0
) -> RMSNorm:
    """Return the norm called `name` of a vector of latent attention, whose result is multiplied by `factor`."""
    spec, weights, prefix, _, kernels = source
    gate = spec.norm_gate
    if gate is not None and gate.has_latent_gates:
        return read_gated_norm(spec, gate, weights, f"{prefix}{name}", size, eps, kernels, factor)
    return RMSNorm(weights.read_vector(f"{prefix}{name}.weight", size) * factor, eps)


def read_stream_norm(spec: ModelSpec, weights: WeightReader, name: str) -> HeadNorm:
    """Return the norm called `name` of each stream [T, N, D]. All streams have weights of their own."""
    shape = spec.num_streams, spec.hidden_size
    weight_E = weights.read_elements(f"{name}.weight", shape[0] * shape[1])
    return HeadNorm(weight_E.view(shape) + spec.norm_weight_offset, spec.norm_eps)
