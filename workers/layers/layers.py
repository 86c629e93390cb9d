"""The building blocks of a decoder layer, as plain functions of tensors.

Shapes: T tokens, D hidden size, F intermediate size, O output features, H heads, K head dimension, S sampled rows,
N slots, L max_model_len. For mixtures of experts: E experts, C choices of a token, A choices of all tokens by expert,
I input features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...protocol.arrays import Int32Array
from ..loaders.quantization.matrix import QuantizedMatrix, Weight
from ..sampling import SamplingMetadata, choose_greedy, choose_tokens
from .activations import ACTIVATIONS
from .expert_order import ExpertOrder, order_by_expert
from .low_rank import LowRankChanges, TorchLowRank
from .rope import RotaryEmbedding, RotaryTables
from .specs.experts import ExpertsSpec

Linear = Callable[[Any], Tensor]
GatedActivation = Callable[[Tensor], Any]
GroupedLinear = Callable[[Tensor, Tensor], Tensor]
"""Maps (x_AI, ends_E) to y_AO, where rows ends_E[e - 1] to ends_E[e] of x are multiplied by expert e's matrix."""

ExpertChooser = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Maps a router's logits, float32 [T, E], to the numbers and weights of the chosen experts; see `Router`."""


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


class GroupedNorm(RMSNorm):
    """Root-mean-square norm of each of several equal parts of the last dimension."""

    __slots__ = ("num_groups",)

    def __init__(self, weight: Tensor, eps: float, num_groups: int) -> None:
        super().__init__(weight, eps)
        self.num_groups = num_groups

    def __call__(self, x: Tensor) -> Any:
        """Return the norm of `x`."""
        parts = x.float().unflatten(-1, (self.num_groups, -1))
        normed = torch.rms_norm(parts, parts.shape[-1:], None, self.eps).flatten(-2)
        return normed.mul_(self.weight).to(x.dtype)


class InputScaledNorm(RMSNorm):
    """Root-mean-square norm of the input times the weight."""

    def __call__(self, x: Tensor) -> Any:
        """Return the norm of `x`."""
        scaled = (x.float() * self.weight).to(x.dtype)
        return torch.rms_norm(scaled.float(), self.shape, None, self.eps).to(x.dtype)


class LayerNorm(RMSNorm):
    """Layer norm over the last dimension, computed in float32 and rounded once."""

    __slots__ = ("bias",)

    def __init__(self, weight: Tensor, eps: float, bias: Tensor | None = None) -> None:
        super().__init__(weight, eps)
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Any:
        """Return the norm of `x`."""
        return F.layer_norm(x.float(), self.shape, self.weight, self.bias, self.eps).to(x.dtype)


class AffineNorm(LayerNorm):
    """The weights and biases of a norm, without a division."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Any:
        """Return the product of `x` and the weights, plus the biases."""
        y = x.float() * self.weight
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class GatedNorm(RMSNorm):
    """Root-mean-square norm whose result x is multiplied by factor * sigmoid(up(silu(down(x))))."""

    __slots__ = ("down", "factor", "up")

    def __init__(
        self, weight: Tensor, eps: float, down: Linear, up: Linear, factor: float = 1.0
    ) -> None:
        super().__init__(weight, eps)
        self.down, self.up, self.factor = down, up, factor

    def __call__(self, x: Tensor) -> Any:
        """Return the gated norm of `x`."""
        y = super().__call__(x)
        gate = torch.sigmoid(self.up(F.silu(self.down(y))).float())
        return (y * (gate if self.factor == 1.0 else gate * self.factor)).to(y.dtype)


_SMALLEST_NORM = 1e-6


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


class KeyNorm(HeadNorm):
    """A norm of the heads after the first `num_queries` ones, which stay unchanged."""

    __slots__ = ("num_queries",)

    def __init__(self, weight_GK: Tensor, eps: float, num_queries: int) -> None:
        super().__init__(weight_GK, eps)
        self.num_queries = num_queries

    def __call__(self, x_THK: Tensor) -> Tensor:
        """Return the queries, and the normed keys."""
        q_THK, k_TGK = x_THK.tensor_split((self.num_queries,), 1)
        return torch.cat((q_THK, super().__call__(k_TGK)), 1)


class HeadBound(HeadNorm):
    """Divides each head, after its product with the weight, so that its norm is at most `bound`."""

    __slots__ = ("bound",)

    def __init__(self, weight_HK: Tensor, bound: float) -> None:
        super().__init__(weight_HK, _SMALLEST_NORM)
        self.bound = bound

    def __call__(self, x_THK: Tensor) -> Tensor:
        """Return each head within the bound."""
        y_THK = x_THK.float() * self.weight_HK
        norm_TH1 = y_THK.square().sum(-1, keepdim=True).sqrt()
        return y_THK.mul_((self.bound / (norm_TH1 + self.eps)).clamp(max=1.0)).to(x_THK.dtype)


class HeadLayerNorm(HeadNorm):
    """A layer norm applied to each head; `bias_HK` is like the weight."""

    __slots__ = ("bias_HK",)

    def __init__(self, weight_HK: Tensor, eps: float, bias_HK: Tensor | None) -> None:
        super().__init__(weight_HK, eps)
        self.bias_HK = bias_HK

    def __call__(self, x_THK: Tensor) -> Tensor:
        """Return the norm of each head."""
        normed_THK = F.layer_norm(x_THK.float(), x_THK.shape[-1:], None, None, self.eps)
        normed_THK = normed_THK.mul_(self.weight_HK)
        if self.bias_HK is not None:
            normed_THK = normed_THK.add_(self.bias_HK)
        return normed_THK.to(x_THK.dtype)


class LayerKernels:
    """Implementations of the layers' operations and of sampling. These use torch, on any device.

    Other implementations may return the input of the following product, `consumer`, in another format, such as float8.
    """

    keeps_quantized = False
    """True if products accept some quantized matrices without dequantizing them."""

    finds_rows = True
    """True if the host determines the rows of each LoRA adapter, which embedding, head, experts and biases need."""

    def can_keep(self, matrix: QuantizedMatrix) -> bool:
        """Return whether products accept this matrix without dequantizing it."""
        return False

    def linear(self, weight: Weight, bias_O: Tensor | None = None) -> Linear:
        """Return the function x_TD -> x @ weight.T + bias. `can_keep` must accept a quantized weight."""
        assert isinstance(weight, Tensor)
        return linear(weight, bias_O)

    def low_rank(
        self,
        heights: Sequence[int],
        num_inputs: int,
        capacity: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LowRankChanges:
        """Return an empty set of LoRA changes to a product.

        Args:
            heights: The number of output features of each of the product's matrices.
            num_inputs: The number of input features.
            capacity: The maximum number of adapters.
            max_rank: Their highest rank.
            dtype: The dtype of their factors.
            device: The device of the factors.
        """

        def multiply(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
            return self.linear(weight_OI.to(device), None if bias_O is None else bias_O.to(device))

        return TorchLowRank(heights, dtype, multiply)

    def router_linear(self, weight_ED: Tensor) -> Linear:
        """Return the function x_TD -> x @ weight.T in float32; `weight_ED` is float32."""
        # Multiply in float64. The order of a sum depends on the number of tokens, but rounding to float32 removes the
        # difference.
        weight_ED = weight_ED.double()
        return lambda x_TD: F.linear(x_TD.double(), weight_ED).float()

    def grouped_linear(self, weights: Sequence[Weight], biases: Sequence[Tensor]) -> GroupedLinear:
        """Return the function that multiplies rows by the matrices of their experts; `biases` are [O] each, or none.

        Rows from the last end on have undefined results.
        """
        linears = [self.linear(weight, bias) for weight, bias in zip_longest(weights, biases)]

        def forward(x_AI: Tensor, ends_E: Tensor) -> Tensor:
            outputs, start = [], 0
            for multiply, end in zip(linears, ends_E.tolist(), strict=True):
                if end > start:
                    outputs.append(multiply(x_AI[start:end]))
                start = end
            if start < len(x_AI):
                outputs.append(linears[0](x_AI[start:]).zero_())
            return torch.cat(outputs)

        return forward

    def chooser(
        self, spec: ExpertsSpec, bias_E: Tensor | None, correction_E: Tensor | None
    ) -> ExpertChooser | None:
        """Return a kernel that chooses experts by these biases; None to choose them in `Router`."""
        return None

    def order_choices(self, expert_TC: Tensor, num_experts: int) -> ExpertOrder:
        """See `expert_order.order_by_expert`."""
        return order_by_expert(expert_TC, num_experts)

    def combine(self, y_AD: Tensor, place_A: Tensor, weights_TC: Tensor) -> Tensor:
        """Return the weighted sum [T, D] of each token's C rows, in their order.

        Choice i of all tokens is row `place_A[i]` of `y_AD`. Choices of weight 0 are ignored.
        """
        y_TCD = y_AD.index_select(0, place_A).unflatten(0, weights_TC.shape)
        total_TD = y_TCD[:, 0].float() * weights_TC[:, 0, None]
        for i in range(1, weights_TC.shape[1]):
            total_TD.addcmul_(y_TCD[:, i].float(), weights_TC[:, i, None])
        return total_TD.to(y_AD.dtype)

    def norm(self, weight_D: Tensor, eps: float, consumer: Linear | None = None) -> RMSNorm:
        """Return an RMS norm; `weight_D` is float32."""
        return RMSNorm(weight_D, eps)

    def gated_activation(self, name: str, consumer: Linear | None = None) -> GatedActivation:
        """Return the function gate_up_T2F -> activation(gate) * up of a fused projection."""
        return gated_by(name)

    def activation(self, name: str) -> Callable[[Tensor], Tensor]:
        """Return the function of this name, which is applied to each element."""
        return ACTIVATIONS[name]

    def choose_tokens(
        self, logits_SV: Tensor, metadata: SamplingMetadata, positions_S: Int32Array
    ) -> Tensor:
        """See `sampling.choose_tokens`."""
        return choose_tokens(logits_SV, metadata, positions_S)

    def choose_greedy(self, logits_SV: Tensor) -> Tensor:
        """Return the most likely token of each row, as `choose_tokens` does for greedy sampling."""
        return choose_greedy(logits_SV)

    def append_tokens(self, token_ids_NL: Tensor, index_S: Tensor, tokens_S: Tensor) -> None:
        """Write `tokens_S` to the places after `index_S`, int32, in the flat `token_ids_NL`; negative tokens as 0."""
        token_ids_NL.view(-1)[1:][index_S] = tokens_S.clamp(min=0).to(torch.int32)

    def rotary_tables(self, rope: RotaryEmbedding, positions: Tensor) -> RotaryTables:
        """See `RotaryEmbedding.tables`."""
        return rope.tables(positions)


def linear(weight_OD: Tensor, bias_O: Tensor | None = None) -> Linear:
    """Return the function x_TD -> x @ weight.T + bias for fixed weights.

    On the CPU, bfloat16 weights are stored in oneDNN's blocked layout, so that they are not repacked in every call.
    That is two to three times as fast for few tokens, and never slower.
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
        # no time, and makes a token's result independent of the number of tokens in the step.
        if x_TD.shape[0] == 1:
            return multiply(x_TD.repeat(2, 1), packed, bias_O, "none", [], "")[:1]
        return multiply(x_TD, packed, bias_O, "none", [], "")

    return forward


class XIELU:
    """The xIELU activation (arXiv 2411.13010) with the trained parameters of one layer, in float32."""

    def __init__(self, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> None:
        self.beta, self.eps = beta, eps
        self.alpha_p = F.softplus(alpha_p)
        self.alpha_n = beta + F.softplus(alpha_n)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the activations in the dtype of `x`."""
        y = x.float()
        curved = torch.expm1(torch.minimum(y, self.eps)) - y
        y = torch.where(y > 0, self.alpha_p * y * y, curved * self.alpha_n) + self.beta * y
        return y.to(x.dtype)


_SWIGLU_LIMIT, _SWIGLU_SLOPE = 7.0, 1.702
"""The constants of gpt-oss: the limit of gate and up, and the factor in the sigmoid."""


def clamped_swiglu(gate_up_T2F: Tensor, limit: float = _SWIGLU_LIMIT) -> Tensor:
    """Return (up + 1) * gate * sigmoid(1.702 * gate), with gate at most `limit` and up in the range of +-`limit`."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, -1)
    gate_TF = gate_TF.clamp(max=limit)
    up_TF = up_TF.clamp(-limit, limit)
    return (up_TF + 1) * (gate_TF * torch.sigmoid(gate_TF * _SWIGLU_SLOPE))


def gated_by(name: str) -> GatedActivation:
    """Return the function gate_up_T2F -> activation(gate) * up of a fused projection."""
    if name == "clamped_swiglu":
        return clamped_swiglu
    activation = ACTIVATIONS[name]

    def forward(gate_up_T2F: Tensor) -> Tensor:
        gate_TF, up_TF = gate_up_T2F.chunk(2, -1)
        return activation(gate_TF).mul_(up_TF)

    return forward
