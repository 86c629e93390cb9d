"""Torch's own products of float8 matrices, which are faster than Engine's kernel for many tokens.

The product with one scale for each block of 128 x 128 elements exists on Hopper GPUs with CUDA 12.9 or later. As its
layout of scales has changed between releases, it is used only if a product of random numbers is correct.

Shapes: T tokens, O output and D input features, G groups of 128 columns, B blocks of 128 rows.
"""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..float8 import Float8Rows, Rounding

logger = logging.getLogger(__name__)

_ALIGNMENT = 16
"""torch requires both sizes of a matrix to be multiples of it, and with scales of blocks the number of tokens, too."""

_BLOCK = 128
_GROUPS = 4
"""The scales of a block of rows are padded to a multiple of it."""

_TOLERANCE = 0.02


class LibraryProduct(Protocol):
    """A product with a fixed matrix."""

    def __call__(self, x: Float8Rows, bias_O: Tensor | None, out_TO: Tensor) -> None:
        """Write x @ matrix.T + bias, all in bfloat16 but `x`."""


class RowScaledProduct:
    """The product with a matrix that has one scale per row."""

    def __init__(self, weight_OD: Tensor, scale_O1: Tensor) -> None:
        self._weight_DO, self._scale_1O = weight_OD.T, scale_O1.float().view(1, -1)

    def __call__(self, x: Float8Rows, bias_O: Tensor | None, out_TO: Tensor) -> None:
        """Write the product."""
        x_TD, x_scale_T1 = x
        if x_scale_T1 is None:
            x_scale_T1 = torch.ones((len(x_TD), 1), device=x_TD.device)
        multiply = partial(
            torch._scaled_mm,
            x_TD,
            self._weight_DO,
            x_scale_T1,
            self._scale_1O,
            bias_O,
            out_dtype=out_TO.dtype,
        )
        if out_TO.is_contiguous():
            multiply(out=out_TO)
        else:
            out_TO.copy_(multiply())


class BlockScaledProduct:
    """The product with a matrix that has one scale per block; the input has one for each group of a token."""

    def __init__(self, weight_OD: Tensor, scale_BG: Tensor) -> None:
        self._weight_DO = weight_OD.T
        padding = -scale_BG.shape[1] % _GROUPS
        self._scale_GB = F.pad(scale_BG.float(), (0, padding)).contiguous().T

    def __call__(self, x: Float8Rows, bias_O: Tensor | None, out_TO: Tensor) -> None:
        """Write the product."""
        x_TD, x_scale_TG = x
        assert x_scale_TG is not None
        num_tokens = len(x_TD)
        if padding := -num_tokens % _ALIGNMENT:
            x_TD = F.pad(x_TD.view(torch.uint8), (0, 0, 0, padding)).view(x_TD.dtype)
            x_scale_TG = F.pad(x_scale_TG, (0, 0, 0, padding), value=1.0)
        product_TO = F.scaled_mm(
            x_TD,
            self._weight_DO,
            # The scales of a group are neighbors.
            x_scale_TG.T.contiguous().T,
            F.ScalingType.BlockWise1x128,
            self._scale_GB,
            F.ScalingType.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )[:num_tokens]
        if bias_O is None:
            out_TO.copy_(product_TO)
        else:
            torch.add(product_TO, bias_O, out=out_TO)


def library_product(
    weight_OD: Tensor, scale_OG: Tensor, rounding: Rounding | None
) -> LibraryProduct | None:
    """Return torch's product with a float8 matrix whose input is rounded; None if there is none."""
    if rounding is None or weight_OD.dtype != torch.float8_e4m3fn:
        return None
    if any(size % _ALIGNMENT for size in weight_OD.shape):
        return None
    if scale_OG.shape[1] == 1 and rounding.group_size is None:
        return RowScaledProduct(weight_OD, scale_OG)
    if rounding.group_size != _BLOCK or any(size % _BLOCK for size in weight_OD.shape):
        return None
    scale_BRG = scale_OG.unflatten(0, (-1, _BLOCK))
    has_blocks = torch.equal(scale_BRG, scale_BRG[:, :1].expand_as(scale_BRG))
    if not has_blocks or not has_block_product(weight_OD.device):
        return None
    return BlockScaledProduct(weight_OD, scale_BRG[:, 0])


@cache
def has_block_product(device: torch.device) -> bool:
    """Return whether torch's product with block scales is correct on this device, and log the result."""
    reason = _find_fault(device)
    if reason is None:
        logger.info("float8 products with block scales use torch for prompts")
    else:
        logger.info("float8 products with block scales use Engine's kernel: %s", reason)
    return reason is None


def _find_fault(device: torch.device) -> str | None:
    """Return why the product cannot be used."""
    random = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.rand(shape, generator=random, device=device)

    # The number of groups is not a multiple of the padding, and the number of tokens is odd.
    x = Float8Rows((numbers(37, 6 * _BLOCK) - 0.5).to(torch.float8_e4m3fn), numbers(37, 6))
    weight_OD = (numbers(3 * _BLOCK, 6 * _BLOCK) - 0.5).to(torch.float8_e4m3fn)
    scale_BG = numbers(3, 6)
    found_TO = torch.empty((37, len(weight_OD)), dtype=torch.bfloat16, device=device)
    try:
        BlockScaledProduct(weight_OD, scale_BG)(x, None, found_TO)
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).partition("\n")[0]
    assert x.scale_TG is not None
    x_TD = x.values_TD.double() * x.scale_TG.repeat_interleave(_BLOCK, 1)
    scale_OD = scale_BG.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
    expected_TO = x_TD @ (weight_OD.double() * scale_OD).T
    difference = float((found_TO - expected_TO).norm() / expected_TO.norm())
    # A NaN is also wrong.
    return None if difference < _TOLERANCE else f"its error is {difference:.3g}"
