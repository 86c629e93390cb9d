"""Torch's products of float8 matrices equal those of the kernel, or are not used."""

import logging

import pytest
import torch
from engine.workers.cuda.float8 import Rounding
from engine.workers.cuda.quantized.library_products import (
    BlockScaledProduct,
    RowScaledProduct,
    has_block_product,
    library_product,
)
from support.gpu.triton_interpreter import interpret_without_gpu

DEVICE = interpret_without_gpu()


def float8(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device=DEVICE).to(torch.float8_e4m3fn)


def block_scaled() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix and the scales [O, G] of its blocks."""
    scale_BG = torch.rand(2, 3, device=DEVICE)
    return float8(256, 384), scale_BG.repeat_interleave(128, 0)


def test_a_product_that_this_device_lacks_is_logged_once_and_not_used(caplog) -> None:
    weight_OD, scale_OG = block_scaled()
    has_block_product.cache_clear()
    with caplog.at_level(logging.INFO):
        products = [library_product(weight_OD, scale_OG, Rounding(128)) for _ in range(2)]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("float8 products with block scales use ")
    if DEVICE.type == "cpu":
        assert products == [None, None] and "Engine's kernel: " in line


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_the_product_of_blocks_is_right() -> None:
    weight_OD, scale_OG = block_scaled()
    product = library_product(weight_OD, scale_OG, Rounding(128))
    assert product is None or isinstance(product, BlockScaledProduct)
    if product is not None:
        x = Rounding(128)(torch.randn(200, 384, device=DEVICE).bfloat16())
        out_TO = torch.empty(200, 256, dtype=torch.bfloat16, device=DEVICE)
        product(x, torch.ones(256, device=DEVICE).bfloat16(), out_TO)
        values_TD = x.values_TD.float() * x.scale_TG.repeat_interleave(128, 1)
        expected_TO = values_TD @ (weight_OD.float() * scale_OG.repeat_interleave(128, 1)).T + 1
        assert (out_TO - expected_TO).norm() < 0.01 * expected_TO.norm()


def test_matrices_with_other_scales_keep_the_kernel() -> None:
    weight_OD, scale_OG = block_scaled()
    one_O1 = scale_OG[:, :1]
    assert isinstance(library_product(weight_OD, one_O1, Rounding()), RowScaledProduct)
    assert library_product(weight_OD, one_O1, None) is None
    assert library_product(weight_OD[:, :376], one_O1, Rounding()) is None
    scale_OG[5] += 1
    assert library_product(weight_OD, scale_OG, Rounding(128)) is None
    assert library_product(weight_OD, scale_OG, Rounding(64)) is None
    assert library_product(weight_OD.float(), one_O1, Rounding()) is None
