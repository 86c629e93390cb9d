"""The building blocks of a decoder layer, as plain functions of tensors.

T tokens, D hidden size, F intermediate size, O output features, K head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...protocol.arrays import Int32Array
from ..quantization.matrix import QuantizedMatrix, Weight
from ..sampling import SamplingMetadata, choose_greedy, choose_tokens
from .rope import RotaryEmbedding, RotaryTables

Linear = Callable[[Any], Tensor]
GatedActivation = Callable[[Tensor], Any]


class RMSNorm:
    """Root-mean-square norm over the last dimension, computed in float32 and rounded once."""

    __slots__ = ("eps", "shape", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight.float()
        self.eps = eps
        self.shape = weight.shape[-1:]

    def __call__(self, x: Tensor) -> Any:
        return torch.rms_norm(x.float(), self.shape, self.weight, self.eps).to(x.dtype)

    def of_sum(self, x: Tensor, block: Tensor, multiplier: float) -> Any:
        """Add `block` * `multiplier` to `x`, in place, and return the norm of that."""
        return self(x.add_(block, alpha=multiplier))


class HeadNorm:
    """A norm over each head of its own; `weight_HK` is float32, with a row for every head."""

    __slots__ = ("eps", "weight_HK")

    def __init__(self, weight_HK: Tensor, eps: float) -> None:
        self.weight_HK = weight_HK
        self.eps = eps

    def __call__(self, x_THK: Tensor) -> Tensor:
        normed_THK = torch.rms_norm(x_THK.float(), x_THK.shape[-1:], None, self.eps)
        return normed_THK.mul_(self.weight_HK).to(x_THK.dtype)


class LayerKernels:
    """What computes the layers' operations and chooses tokens: torch, on any device.

    Other kernels may give the product that follows, `consumer`, its input in the form that it wants, such as float8.
    """

    keeps_quantized = False
    """Whether there are quantized matrices that products can take as they are."""

    def can_keep(self, matrix: QuantizedMatrix) -> bool:
        """Whether this is one of them."""
        return False

    def linear(self, weight: Weight, bias_O: Tensor | None = None) -> Linear:
        """Return x_TD -> x @ weight.T + bias. The weight is quantized only if `can_keep` said that it can be."""
        assert isinstance(weight, Tensor)
        return linear(weight, bias_O)

    def norm(self, weight_D: Tensor, eps: float, consumer: Linear | None = None) -> RMSNorm:
        """`weight_D` is float32."""
        return RMSNorm(weight_D, eps)

    def gated_activation(self, name: str, consumer: Linear | None = None) -> GatedActivation:
        """Return gate_up_T2F -> activation(gate) * up of a fused projection."""
        return GATED_ACTIVATIONS[name]

    def choose_tokens(
        self, logits_SV: Tensor, metadata: SamplingMetadata, positions_S: Int32Array
    ) -> Tensor:
        """See `sampling.choose_tokens`."""
        return choose_tokens(logits_SV, metadata, positions_S)

    def choose_greedy(self, logits_SV: Tensor) -> Tensor:
        """As `choose_tokens`, where every row takes its most likely token."""
        return choose_greedy(logits_SV)

    def append_tokens(self, token_ids_NL: Tensor, index_S: Tensor, tokens_S: Tensor) -> None:
        """Write each token after its place `index_S`, int32, in the flat `token_ids_NL`; 0 for a negative one."""
        token_ids_NL.view(-1)[1:][index_S] = tokens_S.clamp(min=0).to(torch.int32)

    def rotary_tables(self, rope: RotaryEmbedding, positions_T: Tensor) -> RotaryTables:
        """See `RotaryEmbedding.tables`."""
        return rope.tables(positions_T)


def linear(weight_OD: Tensor, bias_O: Tensor | None = None) -> Linear:
    """Return x_TD -> x @ weight.T + bias for fixed weights.

    bfloat16 weights on the CPU are kept in oneDNN's own blocked layout, which spares every call
    the repacking: two to three times faster for few tokens, and never slower.
    """
    if (
        weight_OD.device.type == "cpu"
        and weight_OD.dtype == torch.bfloat16
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return _packed_linear(weight_OD, bias_O)
    return lambda x_TD: F.linear(x_TD, weight_OD, bias_O)


def _packed_linear(weight_OD: Tensor, bias_O: Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OD)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def forward(x_TD: Tensor) -> Tensor:
        # oneDNN adds up a lone row in another order: long ones, and without instructions for bfloat16 any. Two cost no
        # more, and so the result of a token does not depend on how many others share its step.
        if x_TD.shape[0] == 1:
            return multiply(x_TD.repeat(2, 1), packed, bias_O, "none", [], "")[:1]
        return multiply(x_TD, packed, bias_O, "none", [], "")

    return forward


def silu_gated(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up of a fused projection."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, -1)
    return F.silu(gate_TF).mul_(up_TF)


def gelu_tanh_gated(gate_up_T2F: Tensor) -> Tensor:
    """gelu(gate) * up of a fused projection, with gelu's tanh approximation."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, -1)
    return F.gelu(gate_TF, approximate="tanh").mul_(up_TF)


GATED_ACTIVATIONS = {"silu": silu_gated, "gelu_tanh": gelu_tanh_gated}
