"""The changes that LoRA adapters add to a product, for the adapters of all tokens in two kernels.

A token's sums have a fixed order, whatever tokens and adapters share the step.

Shapes: T tokens of a step, N adapters, R rank of all adapters (padded), P matrices of the product, I input features, O
output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layers.low_rank import Factors, StepAdapters

_ROWS: Final = 16
"""Tokens per tile, the minimum for a matrix product on tensor cores."""

_SINGLE_TOKENS: Final = 256
"""Up to this number of tokens, each gets a tile of its own, because most have different adapters."""

_NO_ADAPTER: Final = tl.constexpr(1 << 30)


@triton.jit
def _down_kernel(
    x_ptr,
    x_stride,
    number_ptr,
    down_ptr,
    low_ptr,
    num_tokens,
    num_inputs,
    NUM_RANKS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Multiply a tile of tokens by some rows of their adapters' first factors. Grid (tiles, NUM_RANKS / RANKS).

    x is [T, I] with a stride between tokens, number int32 [T], down [N, NUM_RANKS, I], low float32 [T, NUM_RANKS].
    """
    rows_T = tl.arange(0, ROWS)
    tokens_T = tl.program_id(0).to(tl.int64) * TILE + rows_T
    mask_T = (rows_T < TILE) & (tokens_T < num_tokens)
    ranks_R = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    number_T = tl.load(number_ptr + tokens_T, mask=mask_T, other=-1)
    wanted_T = tl.where(number_T >= 0, number_T, _NO_ADAPTER)
    number = tl.min(wanted_T, 0)
    while number < _NO_ADAPTER:
        is_own_T = wanted_T == number
        sum_TR = tl.zeros((ROWS, RANKS), tl.float32)
        down_row_R = down_ptr + (number.to(tl.int64) * NUM_RANKS + ranks_R) * num_inputs
        for start in range(0, num_inputs, INPUTS):
            inputs_I = start + tl.arange(0, INPUTS)
            mask_I = inputs_I < num_inputs
            x_TI = tl.load(
                x_ptr + tokens_T[:, None] * x_stride + inputs_I[None, :],
                mask=is_own_T[:, None] & mask_I[None, :],
                other=0.0,
            )
            down_IR = tl.load(
                down_row_R[None, :] + inputs_I[:, None], mask=mask_I[:, None], other=0.0
            )
            sum_TR += tl.dot(x_TI, down_IR, input_precision="ieee")
        tl.store(
            low_ptr + tokens_T[:, None] * NUM_RANKS + ranks_R[None, :],
            sum_TR,
            mask=is_own_T[:, None],
        )
        wanted_T = tl.where(is_own_T, _NO_ADAPTER, wanted_T)
        number = tl.min(wanted_T, 0)


@triton.jit
def _up_kernel(
    low_ptr,
    low_stride,
    number_ptr,
    up_ptr,
    up_stride,
    y_ptr,
    y_stride,
    num_tokens,
    num_outputs,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Add the products with one matrix's second factors to the output. Grid (tiles, outputs / OUTPUTS).

    low is float32 [T, RANK] and y [T, O], with strides between tokens; up is [N, O, RANK] with a stride between
    adapters.
    """
    rows_T = tl.arange(0, ROWS)
    tokens_T = tl.program_id(0).to(tl.int64) * TILE + rows_T
    mask_T = (rows_T < TILE) & (tokens_T < num_tokens)
    ranks_R = tl.arange(0, RANK)
    outputs_O = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    mask_O = outputs_O < num_outputs
    number_T = tl.load(number_ptr + tokens_T, mask=mask_T, other=-1)
    wanted_T = tl.where(number_T >= 0, number_T, _NO_ADAPTER)
    number = tl.min(wanted_T, 0)
    while number < _NO_ADAPTER:
        is_own_T = wanted_T == number
        low_TR = tl.load(
            low_ptr + tokens_T[:, None] * low_stride + ranks_R[None, :],
            mask=is_own_T[:, None],
            other=0.0,
        )
        up_RO = tl.load(
            up_ptr + number.to(tl.int64) * up_stride + outputs_O[None, :] * RANK + ranks_R[:, None],
            mask=mask_O[None, :],
            other=0.0,
        )
        change_TO = tl.dot(low_TR, up_RO.to(tl.float32), input_precision="ieee")
        y_TO_ptr = y_ptr + tokens_T[:, None] * y_stride + outputs_O[None, :]
        mask_TO = is_own_T[:, None] & mask_O[None, :]
        y_TO = tl.load(y_TO_ptr, mask=mask_TO, other=0.0).to(tl.float32)
        tl.store(y_TO_ptr, (y_TO + change_TO).to(y_ptr.dtype.element_ty), mask=mask_TO)
        wanted_T = tl.where(is_own_T, _NO_ADAPTER, wanted_T)
        number = tl.min(wanted_T, 0)


class TritonLowRank:
    """The factors of all adapters for one product, on a GPU. Kernel launches depend only on the number of tokens.

    Args:
        heights: The number of output features of each matrix.
        num_inputs: The number of input features.
        capacity: The number of adapters.
        max_rank: Their highest rank, to which all are padded.
        dtype: The dtype of the factors.
        device: The GPU.
    """

    def __init__(
        self,
        heights: Sequence[int],
        num_inputs: int,
        capacity: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._rank = max(_ROWS, triton.next_power_of_2(max_rank))
        self._bounds = list(pairwise(accumulate(heights, initial=0)))
        self._down_NRI = torch.zeros(
            capacity, len(heights) * self._rank, num_inputs, dtype=dtype, device=device
        )
        self._up_NOR = torch.zeros(capacity, sum(heights), self._rank, dtype=dtype, device=device)

    def pack(self, changes: Sequence[Factors | None]) -> tuple[Tensor, Tensor]:
        """Return an adapter's padded factors on the host."""
        down_RI = torch.zeros(self._down_NRI.shape[1:], dtype=self._down_NRI.dtype)
        up_OR = torch.zeros(self._up_NOR.shape[1:], dtype=self._up_NOR.dtype)
        for part, (each, (start, end)) in enumerate(zip(changes, self._bounds, strict=True)):
            if each is not None:
                down, up, bias_O = each
                assert bias_O is None
                first = part * self._rank
                down_RI[first : first + len(down)] = down
                up_OR[start:end, : up.shape[1]] = up
        return down_RI, up_OR

    def install(self, number: int, packed: tuple[Tensor, Tensor] | None) -> None:
        """Copy an adapter to the GPU. The copy happens after the steps that are queued."""
        if packed is None:
            self._up_NOR[number].zero_()
            return
        self._down_NRI[number].copy_(packed[0])
        self._up_NOR[number].copy_(packed[1])

    def add(self, y_TO: Tensor, x_TI: Tensor, adapters: StepAdapters) -> None:
        """Add the change of each row's adapter to the outputs."""
        num_tokens, num_inputs = x_TI.shape
        number_T = adapters.device_number_T
        num_ranks = self._down_NRI.shape[1]
        low_TR = torch.empty(num_tokens, num_ranks, dtype=torch.float32, device=x_TI.device)
        tile = 1 if num_tokens <= _SINGLE_TOKENS else _ROWS
        num_tiles = triton.cdiv(num_tokens, tile)
        _down_kernel[num_tiles, num_ranks // _ROWS](
            x_TI,
            x_TI.stride(0),
            number_T,
            self._down_NRI,
            low_TR,
            num_tokens,
            num_inputs,
            NUM_RANKS=num_ranks,
            TILE=tile,
            ROWS=_ROWS,
            RANKS=_ROWS,
            INPUTS=128,
        )
        for part, (start, end) in enumerate(self._bounds):
            _up_kernel[num_tiles, triton.cdiv(end - start, 64)](
                low_TR[:, part * self._rank :],
                num_ranks,
                number_T,
                self._up_NOR[:, start:],
                self._up_NOR.stride(0),
                y_TO[:, start:],
                y_TO.stride(0),
                num_tokens,
                end - start,
                TILE=tile,
                ROWS=_ROWS,
                RANK=self._rank,
                OUTPUTS=64,
            )
