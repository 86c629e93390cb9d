"""Products with quantized matrices equal those with the dequantized values."""

import pytest
import torch
from engine.workers.cuda.float8 import Float8Rows, Rounding
from engine.workers.cuda.layers import TritonKernels
from engine.workers.cuda.quantized.linear import QuantizedLinear
from engine.workers.cuda.quantized.plane_matrix import can_keep
from engine.workers.loaders.quantization.matrix import ActivationScheme, QuantizedMatrix, merge_rows
from msgspec.structs import replace
from support.gpu.launches import launches
from support.gpu.triton_interpreter import interpret_without_gpu
from torch import Tensor

pytestmark = pytest.mark.slow

DEVICE = interpret_without_gpu()


def random_matrix(
    bits: int | None,
    rows: int = 48,
    columns: int = 192,
    group_size: int = 64,
    *,
    zeros: bool = False,
    offsets: bool = False,
    activations: ActivationScheme = ActivationScheme.NONE,
) -> QuantizedMatrix:
    groups = -(-columns // group_size)
    zero: Tensor | int = 0 if bits is None else 1 << (bits - 1)
    if bits is None:
        values = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    else:
        values = torch.randint(0, 1 << bits, (rows, columns)).to(torch.uint8)
        if zeros:
            zero = torch.randint(0, 1 << bits, (rows, groups)).to(torch.uint8)
    return QuantizedMatrix(
        values,
        bits,
        torch.rand(rows, groups).add_(0.5).to(torch.float32 if bits is None else torch.float16),
        group_size,
        zero,
        torch.randn(rows, groups).half() if offsets else None,
        activations=activations,
        input_scale=0.03 if activations is ActivationScheme.STATIC else None,
    ).to(DEVICE)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def check(matrix: QuantizedMatrix, num_tokens: int, dtype: torch.dtype = torch.float32) -> None:
    x = torch.randn(num_tokens, matrix.shape[1], device=DEVICE).to(dtype)
    bias = torch.randn(matrix.shape[0], device=DEVICE).to(dtype)
    expected = x.float() @ matrix.dequantize(torch.float32).T + bias.float()
    found = QuantizedLinear([matrix], bias, dtype)(x)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert found.dtype == dtype
    assert (found.float() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 192])
def test_integer_products_equal_dequantized_ones(bits: int, group_size: int) -> None:
    check(random_matrix(bits, group_size=group_size), 3)


@pytest.mark.parametrize(("zeros", "offsets"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("group_size", [32, 128, 192])
def test_integer_products_with_zeros_and_offsets_equal_dequantized_ones(
    group_size: int, zeros: bool, offsets: bool
) -> None:
    check(random_matrix(4, group_size=group_size, zeros=zeros, offsets=offsets), 5)


@pytest.mark.parametrize("group_size", [32, 128, 192])
def test_products_of_float8_weights_equal_dequantized_ones(group_size: int) -> None:
    check(random_matrix(None, group_size=group_size), 4, torch.float16)


@pytest.mark.parametrize("num_tokens", [1, 17, 33, 65, 260])
def test_products_of_any_number_of_tokens_equal_dequantized_ones(num_tokens: int) -> None:
    check(random_matrix(4, rows=70, columns=160, group_size=32), num_tokens, torch.float16)


@pytest.mark.parametrize("num_tokens", [1, 16, 64, 500 if DEVICE.type == "cuda" else 130])
@pytest.mark.parametrize(
    ("bits", "group_size", "zeros", "offsets"),
    [
        (4, 128, True, False),
        (4, 64, True, False),
        (4, 32, False, True),
        (6, 16, False, False),
        (8, None, False, False),
        (None, None, False, False),
        (None, 32, False, False),
    ],
)
def test_exactly_representable_sums_are_exact(
    num_tokens: int, bits: int | None, group_size: int | None, zeros: bool, offsets: bool
) -> None:
    """With many columns, a tile's operands must stay valid while those of the next tile are loaded."""
    columns = 4096 if DEVICE.type == "cuda" else 640
    rows = 1000 if DEVICE.type == "cuda" else 40
    matrix = random_matrix(
        bits, rows, columns, group_size or columns, zeros=zeros, offsets=offsets
    ).to(torch.device("cpu"))
    scale_OG = 2.0 ** torch.randint(-1, 2, matrix.scale_OG.shape)
    matrix = replace(matrix, scale_OG=scale_OG.to(matrix.scale_OG.dtype))
    if bits is None:
        values_OD = torch.randint(-8, 9, (rows, columns)).to(torch.float8_e4m3fn)
        matrix = replace(matrix, values_OD=values_OD)
    if matrix.offset_OG is not None:
        matrix = replace(matrix, offset_OG=matrix.offset_OG.round())
    x = torch.randint(-1, 2, (num_tokens, columns))
    expected = (x.double() @ matrix.dequantize(torch.float32).double().T).float()
    linear = QuantizedLinear([matrix.to(DEVICE)], None, torch.float32)
    # The interpreter multiplies no bfloat16 matrices.
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
    assert torch.equal(linear(x.to(DEVICE, dtype)).cpu(), expected)


def test_the_last_group_may_be_incomplete() -> None:
    check(random_matrix(4, columns=200, group_size=64), 3)


def test_columns_may_be_in_another_order() -> None:
    matrix = random_matrix(4, group_size=64)
    check(replace(matrix, column_order_D=torch.randperm(matrix.shape[1], device=DEVICE)), 3)


def test_group_size_need_not_be_a_power_of_two() -> None:
    check(random_matrix(8, group_size=96), 3)
    assert not can_keep(random_matrix(8, group_size=24))


@pytest.mark.parametrize("is_quantized", [True, False])
@pytest.mark.parametrize("columns", [1536, 1500])
def test_products_of_a_token_do_not_depend_on_the_number_of_tokens(
    columns: int, is_quantized: bool
) -> None:
    """The columns are split among programs only for few tokens."""
    matrix = random_matrix(4, rows=16, columns=columns, group_size=128)
    kernels = TritonKernels(torch.float32, has_float8=True, is_batch_invariant=True)
    linear = kernels.linear((matrix,) if is_quantized else matrix.dequantize(torch.float32))
    x = torch.randn(70, columns, device=DEVICE)
    together = linear(x)
    alone = torch.cat([linear(x[:1]), linear(x[1:20]), linear(x[20:])])
    if DEVICE.type == "cuda":
        assert torch.equal(alone, together)
    # The interpreter's own products of two shapes are not the same to the bit.
    assert (alone - together).abs().max() <= 1e-6 * together.abs().max()
    expected = x @ matrix.dequantize(torch.float32).T
    assert (together - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("scheme", [ActivationScheme.TOKEN, ActivationScheme.GROUP])
def test_float8_activations_use_the_whole_range(
    scheme: ActivationScheme,
) -> None:
    size = 64 if scheme is ActivationScheme.GROUP else 150
    x = torch.randn(5, 150, device=DEVICE) * torch.logspace(-3, 3, 5, device=DEVICE)[:, None]
    rows = Rounding(64 if scheme is ActivationScheme.GROUP else None)(x)
    assert rows.scale_TG is not None
    for group, part in enumerate(x.split(size, 1)):
        scale = rows.scale_TG[:, group, None]
        assert torch.allclose(scale * 448, part.abs().amax(1, keepdim=True))
        values = rows.values_TD.split(size, 1)[group].float()
        # Three bits after the point; below 2 ** -6 the steps are of 2 ** -9.
        step = part.abs().clamp(min=scale * 2**-6) / 8
        is_close = (values * scale - part).abs() <= step
        # The interpreter loses the carry of what is rounded up to the next power of two.
        is_carried = torch.frexp(part / scale).mantissa.abs() > 31 / 32
        assert (is_close | (is_carried & (DEVICE.type == "cpu"))).all()


def test_values_too_large_for_a_scale_are_clamped() -> None:
    x = torch.tensor([[1.0, -50.0, 50.0, 44.8]], device=DEVICE)
    rows = Rounding(None, 0.1)(x)
    assert rows.scale_TG is None
    assert rows.values_TD.float().tolist() == [[10.0, -448.0, 448.0, 448.0]]


@pytest.mark.parametrize(
    "scheme", [ActivationScheme.TOKEN, ActivationScheme.STATIC, ActivationScheme.GROUP]
)
def test_products_of_float8_activations_equal_dequantized_ones(scheme: ActivationScheme) -> None:
    group_size = 64 if scheme is ActivationScheme.GROUP else 192
    matrix = random_matrix(None, group_size=group_size, activations=scheme)
    linear = QuantizedLinear([matrix], None, torch.float32)
    assert linear.rounding is not None
    x = torch.randn(9, 192, device=DEVICE) * 3
    rows = linear.rounding(x)
    scale_TG = torch.full((9, 1), 0.03, device=DEVICE) if rows.scale_TG is None else rows.scale_TG
    scale_TD = scale_TG.repeat_interleave(192 // scale_TG.shape[1], 1)
    expected = (rows.values_TD.float() * scale_TD) @ matrix.dequantize(torch.float32).T
    # Hopper's units keep 13 bits of a float8 product's sums until they have added up a tile.
    tolerance = 5e-4 if DEVICE.type == "cuda" else 1e-5
    for found in (linear(x), linear(rows)):
        assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("scheme", [ActivationScheme.TOKEN, ActivationScheme.STATIC])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rows", [(48,), (32, 16)])
def test_float8_products_of_many_tokens_equal_dequantized_ones(
    rows: tuple[int, ...], has_bias: bool, scheme: ActivationScheme
) -> None:
    matrices = [random_matrix(None, n, group_size=192, activations=scheme) for n in rows]
    bias = torch.randn(48, device=DEVICE).bfloat16() if has_bias else None
    linear = QuantizedLinear(matrices, bias, torch.bfloat16)
    values_TD = torch.randn(150, 192, device=DEVICE).to(torch.float8_e4m3fn)
    scale_T1 = torch.rand(150, 1, device=DEVICE) + 0.5
    x = Float8Rows(values_TD, None if scheme is ActivationScheme.STATIC else scale_T1)
    # The scale of a static one is the matrix's.
    scale = scale_T1 if scheme is ActivationScheme.TOKEN else 0.03
    weight = torch.cat([matrix.dequantize(torch.float32) for matrix in matrices])
    expected = (values_TD.float() * scale) @ weight.T + (0 if bias is None else bias.float())
    found = linear(x)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).abs().max() <= 5e-3 * expected.abs().max()


@pytest.mark.parametrize(
    ("num_tokens", "rows", "scheme", "is_batch_invariant", "launched"),
    [
        (129, 48, ActivationScheme.TOKEN, False, []),
        (128, 48, ActivationScheme.TOKEN, False, ["linear_kernel"]),
        # Torch sums in another order.
        (129, 48, ActivationScheme.TOKEN, True, ["linear_kernel"]),
        # Torch cannot multiply these.
        (129, 40, ActivationScheme.TOKEN, False, ["linear_kernel"]),
        # The input is not rounded to float8.
        (256, 48, ActivationScheme.NONE, False, ["linear_kernel"]),
        (257, 48, ActivationScheme.NONE, False, ["dequantize_kernel"]),
        (257, 48, ActivationScheme.NONE, True, ["linear_kernel"]),
    ],
)
def test_float8_products_of_many_tokens_use_torch_where_supported(
    monkeypatch,
    num_tokens: int,
    rows: int,
    scheme: ActivationScheme,
    is_batch_invariant: bool,
    launched: list[str],
) -> None:
    matrix = random_matrix(None, rows, group_size=192, activations=scheme)
    layers = TritonKernels(torch.bfloat16, has_float8=True, is_batch_invariant=is_batch_invariant)
    linear = layers.linear((matrix,))
    dtype = torch.bfloat16 if scheme is ActivationScheme.NONE else torch.float8_e4m3fn
    values_TD = torch.empty(num_tokens, 192, dtype=dtype, device=DEVICE)
    x = Float8Rows(values_TD, torch.empty(num_tokens, 1, device=DEVICE))
    with launches(monkeypatch) as names:
        linear(values_TD if scheme is ActivationScheme.NONE else x)
    # Torch's own kernels are not recorded here.
    assert names == launched


def test_float8_products_of_zeros_are_zero() -> None:
    matrix = random_matrix(None, group_size=192, activations=ActivationScheme.TOKEN)
    found = QuantizedLinear([matrix], None, torch.float32)(torch.zeros(2, 192, device=DEVICE))
    assert torch.equal(found, torch.zeros_like(found))


def test_stacked_matrices_give_their_own_products() -> None:
    kinds = [
        random_matrix(4, rows=20),
        random_matrix(4, rows=12),
        random_matrix(6, rows=8),
        random_matrix(None, rows=8, group_size=192, activations=ActivationScheme.TOKEN),
    ]
    merged = merge_rows(kinds)
    assert [matrix.shape[0] for matrix in merged] == [32, 8, 8]
    x, bias = torch.randn(3, 192, device=DEVICE), torch.randn(48, device=DEVICE)
    found = QuantizedLinear(merged, bias, torch.float32)(x)
    weights = torch.cat([kind.dequantize(torch.float32) for kind in kinds])
    expected = x @ weights.T + bias
    assert (found - expected)[:, :40].abs().max() <= 1e-5 * expected.abs().max()
    assert (found - expected)[:, 40:].abs().max() <= 5e-2 * expected.abs().max()
