"""The layers' operations as Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ...protocol.arrays import Int32Array
from ..layers.expert_order import ExpertOrder
from ..layers.layers import (
    ExpertChooser,
    GatedActivation,
    GroupedLinear,
    LayerKernels,
    Linear,
    RMSNorm,
)
from ..layers.low_rank import LowRankChanges
from ..layers.parallel.parallel_layers import RowParallelLinear
from ..layers.rope import RotaryEmbedding, RotaryTables
from ..layers.specs.experts import ExpertsSpec
from ..loaders.quantization.matrix import QuantizedMatrix, Weight, merge_rows
from ..sampling import SamplingMetadata
from .experts.choosing import choose_experts, router_logits, supports_choice
from .experts.grouped_linear import GroupedLinear as GroupedProduct
from .experts.grouped_linear import combine
from .experts.ordering import order_choices
from .float8 import Rounding, Rows
from .gated_activation import GATED_ACTIVATIONS, gated_activation
from .low_rank import TritonLowRank
from .norm import rms_norm
from .quantized.linear import QuantizedLinear
from .quantized.plane_matrix import can_keep
from .rotary_tables import rotary_tables
from .sampling import append_tokens, choose_greedy, choose_tokens

_FEW_CHOICES = 2048
"""Number of rows up to which the grouped product in Triton is faster than torch's."""

_LIBRARY_ALIGNMENT = 8
"""torch's grouped product requires rows whose size in bytes is a multiple of this."""


class TritonKernels(LayerKernels):
    """The operations of layers in Triton. Quantized matrices are used as they are; other products use torch.

    If a product takes float8, the kernel that computes its input rounds it. `has_float8` says whether the device
    computes with float8. If `is_batch_invariant`, all products use the kernel for quantized matrices, which sums in a
    fixed order, because torch chooses kernels by the number of tokens.
    """

    keeps_quantized = True
    finds_rows = False

    def __init__(
        self, dtype: torch.dtype, *, has_float8: bool, is_batch_invariant: bool = False
    ) -> None:
        self._dtype = dtype
        self._has_float8 = has_float8
        self._is_batch_invariant = is_batch_invariant

    def can_keep(self, matrix: QuantizedMatrix) -> bool:
        """Return whether products accept this matrix without dequantizing it."""
        is_float8 = matrix.bits is None and matrix.values_OD.itemsize == 1
        return (matrix.bits is not None or (is_float8 and self._has_float8)) and can_keep(matrix)

    def linear(self, weight: Weight, bias_O: Tensor | None = None) -> Linear:
        """Return the function x -> x @ weight.T + bias."""
        if isinstance(weight, Tensor):
            if not self._is_batch_invariant:
                return super().linear(weight, bias_O)
            weight = (_unscaled(weight),)
        return QuantizedLinear(
            weight, bias_O, self._dtype, is_batch_invariant=self._is_batch_invariant
        )

    def low_rank(
        self,
        heights: Sequence[int],
        num_inputs: int,
        capacity: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LowRankChanges:
        """Return the changes of LoRA adapters to a product. Two kernels compute them for all adapters."""
        return TritonLowRank(heights, num_inputs, capacity, max_rank, dtype, device)

    def router_linear(self, weight_ED: Tensor) -> Linear:
        """Return the function x_TD -> x @ weight.T, in float32."""
        if self._is_batch_invariant:
            multiply = QuantizedLinear((_unscaled(weight_ED),), None, torch.float32)
            return lambda x_TD: multiply(x_TD.float())
        weight_ED = weight_ED.contiguous()
        return lambda x_TD: router_logits(x_TD, weight_ED)

    def grouped_linear(self, weights: Sequence[Weight], biases: Sequence[Tensor]) -> GroupedLinear:
        """Return the function that multiplies rows by the matrices of their experts.

        Experts that are all quantized in the same way stay quantized.
        """
        bias_EO = torch.cat(tuple(biases)) if biases else None
        parts = [
            matrix for weight in weights if not isinstance(weight, Tensor) for matrix in weight
        ]
        if len(parts) == len(weights) and len(merged := merge_rows(parts)) == 1:
            return self._grouped_product(merged[0], len(weights), bias_EO)
        dense_EOI = torch.stack([self._dense(weight) for weight in weights])
        is_aligned = not any(size % _LIBRARY_ALIGNMENT for size in dense_EOI.shape[1:])
        is_plain = self._dtype == torch.bfloat16 and bias_EO is None and is_aligned
        few = self._grouped_product(_unscaled(dense_EOI.flatten(0, 1)), len(weights), bias_EO)
        if not is_plain or self._is_batch_invariant:
            return few
        return lambda x_AI, ends_E: (
            few(x_AI, ends_E)
            if len(x_AI) <= _FEW_CHOICES
            else F.grouped_mm(x_AI, dense_EOI.mT, offs=ends_E)
        )

    def _grouped_product(
        self, matrix: QuantizedMatrix, num_experts: int, bias_EO: Tensor | None
    ) -> GroupedProduct:
        return GroupedProduct(
            matrix,
            num_experts,
            bias_EO,
            self._dtype,
            is_batch_invariant=self._is_batch_invariant,
        )

    def chooser(
        self, spec: ExpertsSpec, bias_E: Tensor | None, correction_E: Tensor | None
    ) -> ExpertChooser | None:
        """Return the function that chooses experts, if the kernel can."""
        if not supports_choice(spec):
            return None
        return partial(choose_experts, spec, bias_E, correction_E)

    def order_choices(self, expert_TC: Tensor, num_experts: int) -> ExpertOrder:
        """Return the order of choices by expert."""
        return order_choices(expert_TC, num_experts)

    def combine(self, y_AD: Tensor, place_A: Tensor, weights_TC: Tensor) -> Tensor:
        """Return the weighted sum [T, D] of each token's rows."""
        return combine(y_AD, place_A, weights_TC)

    def _dense(self, weight: Weight) -> Tensor:
        if isinstance(weight, Tensor):
            return weight
        return torch.cat([matrix.dequantize(self._dtype) for matrix in weight])

    def norm(self, weight_D: Tensor, eps: float, consumer: Linear | None = None) -> RMSNorm:
        """Return an RMS norm, with its result rounded as the next product, `consumer`, needs."""
        return _Norm(weight_D, eps, _rounding(consumer))

    def gated_activation(self, name: str, consumer: Linear | None = None) -> GatedActivation:
        """Return the function gate_up_T2F -> activation(gate) * up, with its result rounded as `consumer` needs."""
        if name not in GATED_ACTIVATIONS:
            return super().gated_activation(name)
        return partial(gated_activation, name, rounding=_rounding(consumer))

    def choose_tokens(
        self, logits_SV: Tensor, metadata: SamplingMetadata, positions_S: Int32Array
    ) -> Tensor:
        """Return the next token of each row."""
        return choose_tokens(logits_SV, metadata, positions_S)

    def choose_greedy(self, logits_SV: Tensor) -> Tensor:
        """Return the most likely token of each row."""
        return choose_greedy(logits_SV)

    def append_tokens(self, token_ids_NL: Tensor, index_S: Tensor, tokens_S: Tensor) -> None:
        """Write each token after its index."""
        append_tokens(token_ids_NL, index_S, tokens_S)

    def rotary_tables(self, rope: RotaryEmbedding, positions: Tensor) -> RotaryTables:
        """Return the cosines and sines for these positions."""
        return rope.tables(positions) if rope.mix is not None else rotary_tables(rope, positions)


class _Norm(RMSNorm):
    __slots__ = ("_rounding",)

    def __init__(self, weight_D: Tensor, eps: float, rounding: Rounding | None) -> None:
        super().__init__(weight_D, eps)
        self._rounding = rounding

    def __call__(self, x: Tensor) -> Rows:
        """Return the norm of the last dimension, [..., D]; a rounded one is [T, D]."""
        rows = rms_norm(x.flatten(0, -2), self.weight, self.eps, rounding=self._rounding)
        return rows.view(x.shape) if isinstance(rows, Tensor) else rows

    def add_and_norm(self, x_TD: Tensor, block_TD: Tensor, multiplier: float) -> Rows:
        return rms_norm(
            x_TD,
            self.weight,
            self.eps,
            block_TD=block_TD,
            multiplier=multiplier,
            rounding=self._rounding,
        )


def _unscaled(weight_OD: Tensor) -> QuantizedMatrix:
    one_O1 = torch.ones((len(weight_OD), 1), device=weight_OD.device)
    return QuantizedMatrix(weight_OD, None, one_O1, weight_OD.shape[1])


def _rounding(consumer: Linear | None) -> Rounding | None:
    if isinstance(consumer, RowParallelLinear):
        consumer = consumer.own
    return consumer.rounding if isinstance(consumer, QuantizedLinear) else None
