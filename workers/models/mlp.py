"""The feed-forward block of a decoder layer.

Shapes: T tokens of a step, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..layers.activations import ACTIVATIONS, normal_quantile
from ..layers.layers import XIELU, GatedActivation, LayerKernels, Linear, clamped_swiglu
from ..layers.parallel.shard import ModelShard
from ..layers.spec import ModelSpec
from ..layers.specs.experts import GateLimit, SoftCaps
from .layer_source import LayerSource
from .weights import Rows, WeightReader


class DividedNorm:
    """A norm over `size` elements, of which each rank has those of its `weight`.

    It divides by the root mean square. With a `bias`, it is a layer norm, which first subtracts the mean.
    """

    def __init__(
        self, weight: Tensor, eps: float, size: int, shard: ModelShard, bias: Tensor | None = None
    ) -> None:
        self._weight, self._eps, self._size = weight.float(), eps, size
        self._bias = None if bias is None else bias.float()
        self._tensor_parallel = shard.tensor_parallel

    @classmethod
    def read(cls, source: LayerSource, name: str, size: int, part: range) -> DividedNorm:
        """Return the inner norm called `name`, of which this rank has `part`."""
        spec, weights = source.spec, source.weights
        name = f"{source.prefix}{name}"
        bias: Tensor | None = None
        if spec.norm_kind == "layer":
            bias = weights.read_vector(f"{name}.bias", size, part)
        weight = weights.read_vector(f"{name}.weight", size, part)
        return cls(weight, spec.norm_eps, size, source.shard, bias)

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return the norm of this rank's elements."""
        y_TE = x_TE.float()
        if self._bias is not None:
            y_TE = y_TE - self._tensor_parallel.sum(y_TE.sum(-1, keepdim=True)) / self._size
        squares_T1 = self._tensor_parallel.sum(y_TE.square().sum(-1, keepdim=True))
        scale_T1 = (squares_T1 / self._size + self._eps).rsqrt()
        normed_TE = y_TE * scale_T1 * self._weight
        return (normed_TE if self._bias is None else normed_TE + self._bias).to(x_TE.dtype)


class PolyNorm:
    """A cubic polynomial of gates, whose powers are normed over all `size` gates, times `up` (arXiv 2411.03884)."""

    def __init__(self, source: LayerSource, size: int) -> None:
        weights, prefix = source.weights, source.prefix
        self._cubic, self._quadratic, self._linear = weights.read_vector(f"{prefix}weight", 3)
        self._constant_1 = weights.read_vector(f"{prefix}bias", 1)
        self._size, self._tensor_parallel = size, source.shard.tensor_parallel

    def __call__(self, gate_up_T2F: Tensor) -> Tensor:
        """Return the activated products of the gates and `up` of this rank."""
        gate_TF, up_TF = gate_up_T2F.float().chunk(2, -1)
        powers = gate_TF**3, gate_TF**2, gate_TF
        squares_T3 = torch.stack([power_TF.square().sum(-1) for power_TF in powers], -1)
        scales_T3 = (self._tensor_parallel.sum(squares_T3) / self._size + 1e-6).rsqrt()
        cubic_TF, quadratic_TF, linear_TF = (
            power_TF * scale_T[:, None]
            for power_TF, scale_T in zip(powers, scales_T3.unbind(-1), strict=True)
        )
        activated_TF = self._cubic * cubic_TF + self._quadratic * quadratic_TF
        activated_TF += self._linear * linear_TF + self._constant_1
        return (activated_TF * up_TF).to(gate_up_T2F.dtype)


class MLP:
    """Feed-forward block with `intermediate` elements, gated or not."""

    def __init__(
        self,
        source: LayerSource,
        intermediate: int,
        sparsity: float = 0.0,
        limit: GateLimit | None = None,
    ) -> None:
        spec, weights, prefix, shard, kernels = source
        self._tensor_parallel, self._intermediate = shard.tensor_parallel, intermediate
        # The number of standard deviations above the mean below which this fraction of a normal distribution lies.
        self._threshold = normal_quantile(sparsity) if sparsity else None
        self._gate_multiplier, self._multiplier = spec.gate_multiplier, spec.mlp_multiplier
        hidden = spec.hidden_size
        part = shard.tensor_parallel.part(intermediate)
        names = ["gate_proj", "up_proj"] if spec.has_gate else ["up_proj"]
        rows = weights.rows(prefix, names, [intermediate] * len(names), [part] * len(names))
        if spec.alternates_gates:
            order = torch.arange(2 * len(part)).view(-1, 2).T.flatten()
            joint = range(2 * part.start, 2 * part.stop)
            rows = [Rows(f"{prefix}gate_up_proj", 2 * intermediate, joint, order)]
        gate_up = source.read_rows(rows, hidden, has_biases=spec.mlp_bias)
        self.gate_up = weights.adapt_rows(gate_up, rows, hidden)
        self._down = source.read_columns(
            "down_proj",
            hidden,
            intermediate,
            part,
            has_bias=spec.mlp_bias or spec.mlp_output_bias,
            is_adapted=True,
        )
        if spec.activation == "xielu":
            self._activation: Callable[[Tensor], Any] = read_xielu(weights, f"{prefix}act_fn.")
        elif spec.activation == "poly_norm":
            self._activation = PolyNorm(source.at("act_fn."), intermediate)
        elif spec.has_gate:
            consumer = None if spec.has_inner_norms else self._down
            self._activation = gated_activation(kernels, spec, limit, consumer)
        else:
            self._activation = kernels.activation(spec.activation)

        self._inner_norm: DividedNorm | None = None
        if spec.has_inner_norms:
            self._inner_norm = DividedNorm.read(source, "ffn_sub_norm", intermediate, part)

    def forward(self, x: Any) -> Tensor:
        """Return the MLP's output [T, D]."""
        gate_up_T2F = self.gate_up(x)
        if self._gate_multiplier != 1.0:
            gate_up_T2F[:, : gate_up_T2F.shape[1] // 2] *= self._gate_multiplier
        if self._threshold is not None:
            gate_TF = gate_up_T2F[:, : gate_up_T2F.shape[1] // 2]
            gate_TF.copy_(self._sparse(gate_TF, self._threshold))
        activated_TF = self._activation(gate_up_T2F)
        if self._inner_norm is not None:
            activated_TF = self._inner_norm(activated_TF)
        y_TD = self._down(activated_TF)
        return y_TD if self._multiplier == 1.0 else y_TD.mul_(self._multiplier)

    def _sparse(self, gate_TF: Tensor, threshold: float) -> Tensor:
        """Subtract mean + `threshold` standard deviations from the gates, and set negative results to 0."""
        x_TF, count = gate_TF.float(), self._intermediate
        mean_T1 = self._tensor_parallel.sum(x_TF.sum(-1, keepdim=True)) / count
        squares_T1 = self._tensor_parallel.sum((x_TF - mean_T1).square().sum(-1, keepdim=True))
        return F.relu(x_TF - mean_T1 - threshold * (squares_T1 / count).sqrt())


def gated_activation(
    kernels: LayerKernels,
    spec: ModelSpec,
    limit: GateLimit | None,
    consumer: Linear | None = None,
) -> GatedActivation:
    """Return the function gate_up_T2F -> activation(gate) * up of a fused projection, with both factors limited."""
    if spec.soft_caps is not None:
        return partial(_softly_capped, spec.soft_caps)
    name = spec.activation
    if name == "clamped_swiglu" and limit is not None:
        return partial(clamped_swiglu, limit=limit.value)
    activate = kernels.gated_activation(name, consumer)
    if limit is None:
        return activate
    value = limit.value

    def forward(gate_up_T2F: Tensor) -> Any:
        gate_TF, up_TF = gate_up_T2F.chunk(2, -1)
        up_TF.clamp_(-value, value)
        if limit.is_activated:
            return ACTIVATIONS[name](gate_TF).clamp_(max=value).mul_(up_TF)
        gate_TF.clamp_(max=value)
        return activate(gate_up_T2F)

    return forward


def _softly_capped(caps: SoftCaps, gate_up_T2F: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, -1)
    capped_TF = caps.gate * torch.tanh(gate_TF / caps.gate) * torch.sigmoid(gate_TF)
    if caps.up:
        up_TF = caps.up * torch.tanh(up_TF / caps.up)
    return (capped_TF * up_TF).to(gate_up_T2F.dtype)


def read_xielu(weights: WeightReader, prefix: str) -> XIELU:
    """Return the xIELU activation with the trained parameters of one layer."""
    alpha_p, alpha_n = (
        weights.read_vector(f"{prefix}{name}", 1) for name in ("alpha_p", "alpha_n")
    )
    beta, eps = (weights.read_float32(f"{prefix}{name}") for name in ("beta", "eps"))
    return XIELU(alpha_p, alpha_n, beta, eps)
