"""The kernels for norms and gated activations, with and without rounding to float8."""

import pytest
import torch
from engine.workers.cuda.float8 import Float8Rows, Rounding
from engine.workers.cuda.gated_activation import GATED_ACTIVATIONS, gated_activation
from engine.workers.cuda.layers import TritonKernels
from engine.workers.cuda.norm import rms_norm
from engine.workers.layers.layers import gated_by
from support.gpu.triton_interpreter import interpret_without_gpu

pytestmark = pytest.mark.slow

DEVICE = interpret_without_gpu()
COLUMNS = [1, 31, 64, 100, 576, 3000]
ROUNDINGS = [Rounding(), Rounding(32), Rounding(input_scale=0.05)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norm_equals_that_of_torch(columns: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, columns, device=DEVICE).to(dtype)
    weight = torch.randn(columns, device=DEVICE)
    before = x.clone()
    found = rms_norm(x, weight, 1e-5)
    expected = torch.rms_norm(x.float(), (columns,), weight, 1e-5).to(dtype)
    assert torch.equal(x, before)
    torch.testing.assert_close(
        found, expected, rtol=1e-5 if dtype == torch.float32 else 1e-3, atol=1e-6
    )


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norm_of_a_sum_equals_that_of_torch(columns: int, dtype: torch.dtype) -> None:
    x, block = torch.randn(2, 4, columns, device=DEVICE).to(dtype)
    weight = torch.randn(columns, device=DEVICE)
    expected_x = (x.float() + block.float() * 0.22).to(dtype)
    expected = torch.rms_norm(expected_x.float(), (columns,), weight, 1e-6).to(dtype)
    found = rms_norm(x, weight, 1e-6, block_TD=block, multiplier=0.22)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(x, expected_x, rtol=tolerance, atol=1e-3 * tolerance)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_norm_of_rows_of_a_wider_tensor_equals_that_of_torch() -> None:
    wide = torch.randn(5, 96, device=DEVICE)
    weight = torch.ones(32, device=DEVICE)
    expected = torch.rms_norm(wide[:, 32:64], (32,), weight, 1e-6)
    torch.testing.assert_close(rms_norm(wide[:, 32:64], weight, 1e-6), expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("name", GATED_ACTIVATIONS)
def test_gated_activation_equals_that_of_torch(columns: int, name: str) -> None:
    gate_up = torch.randn(3, 2 * columns, device=DEVICE) * 4
    expected = gated_by(name)(gate_up)
    torch.testing.assert_close(gated_activation(name, gate_up), expected, rtol=1e-5, atol=1e-5)


def test_norm_of_heads_equals_that_of_torch() -> None:
    kernels = TritonKernels(torch.float32, has_float8=False)
    x, weight = torch.randn(3, 4, 24, device=DEVICE), torch.randn(24, device=DEVICE)
    expected = torch.rms_norm(x, (24,), weight, 1e-6)
    torch.testing.assert_close(kernels.norm(weight, 1e-6)(x), expected)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("columns", [100, 2200])
def test_fused_rounding_equals_separate_rounding(columns: int, rounding: Rounding) -> None:
    x, block = torch.randn(2, 4, columns, device=DEVICE)
    weight = torch.randn(columns, device=DEVICE)
    gate_up = torch.randn(4, 2 * columns, device=DEVICE)
    for found, plain in (
        (
            rms_norm(x.clone(), weight, 1e-6, block_TD=block, rounding=rounding),
            rms_norm(x.clone(), weight, 1e-6, block_TD=block),
        ),
        (gated_activation("silu", gate_up, rounding), gated_activation("silu", gate_up)),
    ):
        assert isinstance(found, Float8Rows)
        assert isinstance(plain, torch.Tensor)
        expected = rounding(plain)
        assert torch.equal(found.values_TD.view(torch.uint8), expected.values_TD.view(torch.uint8))
        if expected.scale_TG is None:
            assert found.scale_TG is None
        else:
            assert found.scale_TG is not None
            # The mean of the squares may be summed in another order.
            torch.testing.assert_close(found.scale_TG, expected.scale_TG, rtol=1e-6, atol=0)


def test_steps_without_tokens_are_empty() -> None:
    nothing = torch.empty(0, 64, device=DEVICE)
    assert rms_norm(nothing, torch.ones(64, device=DEVICE), 1e-6).shape == (0, 64)
    assert gated_activation("silu", nothing).shape == (0, 32)
