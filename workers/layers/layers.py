"""The building blocks of a decoder layer, as plain functions of tensors.

Shapes: T tokens, D hidden size, F intermediate size, O output features, H heads, K head dimension, S sampled rows,
N slots, L max_model_len.
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
        """Return the norm of `x`."""
        return torch.rms_norm(x.float(), self.shape, self.weight, self.eps).to(x.dtype)

    def add_and_norm(self, x: Tensor, block: Tensor, multiplier: float) -> Any:
        """Add `block` * `multiplier` to `x` in place, and return the norm of the sum."""
        return self(x.add_(block, alpha=multiplier))


class HeadNorm:
    """A norm applied to each head; `weight_HK` is float32 with one row for every head."""

    __slots__ = ("eps", "weight_HK")

    def __init__(self, weight_HK: Tensor, eps: float) -> None:
        self.weight_HK = weight_HK
        self.eps = eps

    def __call__(self, x_THK: Tensor) -> Tensor:
        """Return the norm of each head."""
        normed_THK = torch.rms_norm(x_THK.float(), x_THK.shape[-1:], None, self.eps)
        return normed_THK.mul_(self.weight_HK).to(x_THK.dtype)


class LayerKernels:
    """Implementations of the layers' operations and of sampling: here torch, on any device.

    Other implementations may return the input of the following product, `consumer`, in another format such as float8.
    """

    keeps_quantized = False
    """True if products accept some quantized matrices without dequantizing them."""

    def can_keep(self, matrix: QuantizedMatrix) -> bool:
        """Return whether products accept this matrix without dequantizing it."""
        return False

    def linear(self, weight: Weight, bias_O: Tensor | None = None) -> Linear:
        """Return x_TD -> x @ weight.T + bias. A quantized weight must be one that `can_keep` accepts."""
        assert isinstance(weight, Tensor)
        return linear(weight, bias_O)

    def norm(self, weight_D: Tensor, eps: float, consumer: Linear | None = None) -> RMSNorm:
        """Return a root-mean-square norm; `weight_D` is float32."""
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
        """Return the most likely token of each row, like `choose_tokens` with greedy sampling."""
        return choose_greedy(logits_SV)

    def append_tokens(self, token_ids_NL: Tensor, index_S: Tensor, tokens_S: Tensor) -> None:
        """Write each token behind its index `index_S`, int32, in the flat `token_ids_NL`; a negative index means 0."""
        token_ids_NL.view(-1)[1:][index_S] = tokens_S.clamp(min=0).to(torch.int32)

    def rotary_tables(self, rope: RotaryEmbedding, positions_T: Tensor) -> RotaryTables:
        """See `RotaryEmbedding.tables`."""
        return rope.tables(positions_T)


def linear(weight_OD: Tensor, bias_O: Tensor | None = None) -> Linear:
    """Return x_TD -> x @ weight.T + bias for fixed weights.

    bfloat16 weights on the CPU are stored in oneDNN's blocked layout, so that they are not repacked in every call. This
    is two to three times as fast for few tokens, and never slower.
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
        # oneDNN sums a single row in another order, for long rows or without bfloat16 instructions. A second row costs
        # no time and makes a token's result independent of the number of tokens in the step.
        if x_TD.shape[0] == 1:
            return multiply(x_TD.repeat(2, 1), packed, bias_O, "none", [], "")[:1]
        return multiply(x_TD, packed, bias_O, "none", [], "")

    return forward


def silu_gated(gate_up_T2F: Tensor) -> Tensor:
    """Return silu(gate) * up of a fused projection."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, -1)
    return F.silu(gate_TF).mul_(up_TF)


def gelu_tanh_gated(gate_up_T2F: Tensor) -> Tensor:
    """Return gelu(gate) * up of a fused projection, with gelu's tanh approximation."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, -1)
    return F.gelu(gate_TF, approximate="tanh").mul_(up_TF)


GATED_ACTIVATIONS = {"silu": silu_gated, "gelu_tanh": gelu_tanh_gated}
