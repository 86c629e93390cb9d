"""The linear kernels, compared with float64 and with each other, over many shapes.

R rows of activations, N rows of the matrix, K columns of both.
"""

import numpy as np
import pytest
import torch
from engine.protocol.checkpoint.gguf import GGMLQuantizationType as SourceType
from engine.workers.cpu.packing import (
    ActivationKind,
    PackedWeight,
    WeightFormat,
    WeightMemory,
    allocate_packed,
    can_pack,
    pack_rows,
)
from engine.workers.loaders.dequantize import dequantize
from hypothesis import given
from hypothesis import strategies as st
from support.suite.examples import examples
from support.workers.isas import AMX, ISAS, PORTABLE, select_isa
from support.workers.packed_matrices import (
    EXACT,
    FLOAT8,
    FLOAT8_GROUP,
    FLOAT_TYPES,
    MANY_ROWS,
    PACKINGS,
    F,
    Floats,
    T,
    activations,
    columns_of,
    multiply,
    packed,
    quantized,
    random_weight,
    stored_matrix,
    values_of,
)


@pytest.mark.parametrize(("source_type", "weight_format"), PACKINGS)
def test_packed_rows_equal_those_of_the_checkpoint(
    source_type: int, weight_format: WeightFormat
) -> None:
    n, k = 37, columns_of(weight_format, 512)
    stored = stored_matrix(source_type, n, k)
    expected_NK = values_of(stored, source_type, k)
    got_NK = packed(stored, source_type, weight_format, k).rows(range(n))
    if (source_type, weight_format) in EXACT:
        np.testing.assert_array_equal(got_NK, expected_NK)
    else:
        # Scales are rounded to 11 bits, the middle of a group's range to 8.
        bound = np.abs(expected_NK).max(1, keepdims=True) * 2.0**-8
        assert (np.abs(got_NK - expected_NK) <= bound).all()


@pytest.mark.parametrize(("source_type", "weight_format"), PACKINGS)
@pytest.mark.parametrize("shape", [(1, 256), (40, 512), (100, 1536)])
@pytest.mark.parametrize("isa", ISAS)
def test_product_error_is_bounded_by_the_rounding_of_activations_and_sums(
    isa: int, shape: tuple[int, int], source_type: int, weight_format: WeightFormat
) -> None:
    select_isa(isa)
    n, k = shape[0], columns_of(weight_format, shape[1])
    weight = random_weight(source_type, weight_format, n, k)
    w_NK = weight.rows(range(n)).astype(np.float64)
    x_RK = activations(5, k)
    if weight_format <= F.U8:
        groups = x_RK.reshape(5, -1, 32).astype(np.float64)
        step = np.abs(groups).max(2, keepdims=True) / 127
        rounding_RK = np.broadcast_to(step * 0.5001, groups.shape).reshape(5, k)
    else:
        is_rounded = weight.activation_kind is ActivationKind.BF16
        rounding_RK = np.abs(x_RK) * (2.0**-8 if is_rounded else 0)
    bound_RN = rounding_RK @ np.abs(w_NK).T
    # The terms of integer formats are rounded before codes and offsets cancel.
    sums_RN = np.abs(x_RK) @ (np.abs(w_NK).max(1, keepdims=True) * np.ones((1, k))).T
    bound_RN += sums_RN * k * 2.0**-24
    assert (np.abs(multiply(weight, x_RK) - x_RK @ w_NK.T) <= bound_RN).all()


@pytest.mark.parametrize("weight_format", [f for f in F if f <= F.U8])
def test_int8_activations_are_exact_if_eight_bits_suffice(weight_format: WeightFormat) -> None:
    source_type = next(t for t, f in PACKINGS if f == weight_format)
    weight = random_weight(source_type, weight_format, 20, 256)
    x_RK = np.random.default_rng(2).integers(-126, 127, (3, 256)).astype(np.float32)
    x_RK[:, ::32] = 127
    expected_RN = x_RK @ weight.rows(range(20)).astype(np.float64).T
    # Sums that offsets multiply have 8 bits.
    relative = 2.0**-9 if weight_format in (F.U4_OFFSET, F.U5_OFFSET) else 1e-6
    tolerance = relative * np.abs(x_RK).sum(1).max() * np.abs(weight.rows(range(20))).max()
    np.testing.assert_allclose(multiply(weight, x_RK), expected_RN, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("isa", "source_type", "weight_format"),
    [
        (isa, *packing)
        for isa in ISAS
        for packing in PACKINGS
        if isa != PORTABLE and (isa, packing[1]) != (AMX, F.BF16)
    ],
)
def test_every_instruction_set_is_bit_identical_to_the_portable_code(
    isa: int, source_type: int, weight_format: WeightFormat
) -> None:
    for n, k, rows in ((75, 512, 70), (16, 768, 11)):
        k = columns_of(weight_format, k)
        weight = random_weight(source_type, weight_format, n, k)
        x_RK = activations(rows, k)
        select_isa(PORTABLE)
        expected, expected_RN = quantized(weight, x_RK), multiply(weight, x_RK)
        select_isa(isa)
        # Sets without products of bf16 have floats in their place.
        if weight.activation_kind is not ActivationKind.BF16:
            np.testing.assert_array_equal(quantized(weight, x_RK), expected)
        np.testing.assert_array_equal(multiply(weight, x_RK), expected_RN)


def without_subnormals(x: Floats) -> Floats:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def product_as_amx_sums_it(weight: PackedWeight, x_RK: Floats) -> Floats:
    """Sum in steps of 32: even products, odd products, their sum, then the previous sum."""
    rounded_RK = torch.from_numpy(x_RK).to(torch.bfloat16).float().numpy()
    x_KR1 = without_subnormals(rounded_RK).T[:, :, None]
    w_K1N = weight.rows(range(weight.n)).T[:, None]
    out_RN = np.zeros((len(x_RK), weight.n), np.float32)
    for step in range(0, weight.k, 32):
        halves = [np.zeros_like(out_RN), np.zeros_like(out_RN)]
        for i in range(step, min(step + 32, weight.k)):
            halves[i % 2] = without_subnormals(halves[i % 2] + x_KR1[i] * w_K1N[i])
        out_RN = without_subnormals(out_RN + without_subnormals(halves[0] + halves[1]))
    return out_RN


@pytest.mark.skipif(AMX not in ISAS, reason="needs AMX")
@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (64, 32), (16, 33), (75, 131), (40, 256), (70, 576), (150, 2080)]
)
def test_amx_sums_bf16_products_in_its_documented_order(n: int, k: int) -> None:
    select_isa(AMX)
    weight = random_weight(T.BF16, F.BF16, n, k)
    x_RK = activations(MANY_ROWS, k)
    # The products of these numbers are near the border of the subnormal numbers.
    x_RK[3] *= np.float32(2.0**-118)
    expected_RN = product_as_amx_sums_it(weight, x_RK)
    for rows in (*range(1, 41), 48, 49, 64, 65, MANY_ROWS):
        first = 7 * rows % (MANY_ROWS - rows + 1)
        for n_begin in {0, rows * 16 % n // 16 * 16}:
            got_RN = multiply(weight, x_RK[first : first + rows], n_begin)
            np.testing.assert_array_equal(
                np.ascontiguousarray(got_RN).view(np.uint32),
                np.ascontiguousarray(expected_RN[first : first + rows, n_begin:]).view(np.uint32),
            )


INTEGER_PACKINGS = [(t, f) for t, f in PACKINGS if f <= F.U8]


def test_outliers_do_not_reduce_the_precision_of_their_group() -> None:
    weight = random_weight(T.Q8_0, F.U8, 48, 512)
    w_NK = weight.rows(range(48)).astype(np.float64)
    x_RK = np.random.default_rng(3).standard_normal((4, 512), np.float32)
    x_RK[:, [70, 300]] *= 40
    int8, split = (
        np.abs(multiply(weight, x_RK, kind=kind) - x_RK @ w_NK.T).std()
        for kind in (ActivationKind.INT8, ActivationKind.INT8_SPLIT)
    )
    x_RK[:, [70, 300]] /= 40
    without_outliers = np.abs(multiply(weight, x_RK) - x_RK @ w_NK.T).std()
    assert split < 1.2 * without_outliers < 0.25 * int8


@pytest.mark.parametrize("isa", ISAS)
def test_only_blocks_of_four_with_outliers_have_second_terms(isa: int) -> None:
    select_isa(isa)
    weight = random_weight(T.Q8_0, F.U8, 16, 512)
    x_RK = np.random.default_rng(4).uniform(-1, 1, (2, 512)).astype(np.float32)
    x_RK[0, [70, 300]] = 100, -3000
    # If all values are large, none is an outlier.
    x_RK[1, 96:128] *= 1000
    groups_RGB = quantized(weight, x_RK, ActivationKind.INT8_SPLIT)[:, : 16 * 64].reshape(2, 16, 64)
    fours = groups_RGB[:, :, 56:60].copy().view(np.uint32)[:, :, 0]
    expected = np.zeros((2, 16), np.uint32)
    expected[0, [70 // 32, 300 // 32]] = 1 << 70 % 32 // 4, 1 << 300 % 32 // 4
    np.testing.assert_array_equal(fours, expected)


def test_rows_without_outliers_are_plain_int8() -> None:
    for source_type, weight_format in INTEGER_PACKINGS:
        weight = random_weight(source_type, weight_format, 32, 256)
        x_RK = np.random.default_rng(4).uniform(-1, 1, (20, 256)).astype(np.float32)
        expected_RN = multiply(weight, x_RK, kind=ActivationKind.INT8)
        # This also holds if other rows have outliers.
        x_RK[3, 40], x_RK[7, 200] = 1000, 1000
        others = [r for r in range(20) if r not in (3, 7)]
        split_RN = multiply(weight, x_RK, kind=ActivationKind.INT8_SPLIT)
        np.testing.assert_array_equal(split_RN[others], expected_RN[others])


def split_activations(rows: int, k: int) -> Floats:
    """Return rows that have outliers in different blocks of four."""
    x_RK = activations(rows, k, seed=5)
    for row, column in enumerate(np.random.default_rng(6).integers(0, k, rows)):
        x_RK[row, column] = 100 * np.abs(x_RK[row]).max()
    return x_RK


@pytest.mark.parametrize(("source_type", "weight_format"), INTEGER_PACKINGS)
@pytest.mark.parametrize("isa", ISAS)
def test_products_of_outliers_are_bit_identical_for_every_set_and_batch(
    isa: int, source_type: int, weight_format: WeightFormat
) -> None:
    kind = ActivationKind.INT8_SPLIT
    weight = random_weight(source_type, weight_format, 37, 2304)
    x_RK = split_activations(41, 2304)
    select_isa(PORTABLE)
    expected, expected_RN = quantized(weight, x_RK, kind), multiply(weight, x_RK, kind=kind)
    select_isa(isa)
    np.testing.assert_array_equal(quantized(weight, x_RK, kind), expected)
    np.testing.assert_array_equal(multiply(weight, x_RK, kind=kind), expected_RN)
    for first, last in ((0, 1), (3, 10), (5, 22), (40, 41)):
        part = multiply(weight, np.ascontiguousarray(x_RK[first:last]), 16, kind=kind)
        np.testing.assert_array_equal(part, expected_RN[first:last, 16:])
    x_RK[7, 100] = np.nan
    got_RN = multiply(weight, x_RK, kind=kind)
    assert np.isnan(got_RN[7]).all()
    others = np.arange(41) != 7
    np.testing.assert_array_equal(got_RN[others], expected_RN[others])


@pytest.fixture(scope="module", params=PACKINGS, ids=lambda p: f"{p[0]}-{p[1].name}")
def product(request: pytest.FixtureRequest) -> tuple[PackedWeight, Floats, dict[int, Floats]]:
    """Return a matrix, activations and their product by each instruction set, for all rows at once."""
    source_type, weight_format = request.param
    k = columns_of(weight_format, 256)
    weight = random_weight(source_type, weight_format, 150, k)
    x_RK = activations(MANY_ROWS, k)
    whole_RN = {}
    for isa in ISAS:
        select_isa(isa)
        whole_RN[isa] = multiply(weight, x_RK)
    return weight, x_RK, whole_RN


@examples(25)
@given(data=st.data())
def test_an_element_does_not_depend_on_the_rows_and_columns_beside_it(
    product: tuple[PackedWeight, Floats, dict[int, Floats]], data: st.DataObject
) -> None:
    weight, x_RK, whole_RN = product
    isa = data.draw(st.sampled_from(ISAS))
    first = data.draw(st.integers(0, MANY_ROWS - 1))
    last = data.draw(st.integers(first + 1, MANY_ROWS))
    begin = data.draw(st.integers(0, 9)) * 16
    end = data.draw(st.sampled_from([*range(begin + 16, 150, 16), 150]))
    select_isa(isa)
    part = multiply(weight, np.ascontiguousarray(x_RK[first:last]), begin, end)
    np.testing.assert_array_equal(part, whole_RN[isa][first:last, begin:end])


@pytest.mark.parametrize("isa", ISAS)
def test_products_of_many_rows_and_columns_are_computed_in_cached_blocks(isa: int) -> None:
    select_isa(isa)
    weight = random_weight(T.Q4_1, F.U4_OFFSET, 600, 1536)
    x_RK = activations(40, 1536)
    whole_RN = multiply(weight, x_RK)
    for row in (0, 15, 16, 39):
        np.testing.assert_array_equal(multiply(weight, x_RK[row : row + 1])[0], whole_RN[row])
    for begin, end in ((0, 16), (272, 304), (576, 600)):
        np.testing.assert_array_equal(multiply(weight, x_RK, begin, end), whole_RN[:, begin:end])


@pytest.mark.parametrize(("source_type", "weight_format"), PACKINGS)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_input_affects_every_output_of_its_row_only(
    bad: float, isa: int, source_type: int, weight_format: WeightFormat
) -> None:
    select_isa(isa)
    weight = random_weight(source_type, weight_format, 20, 256)
    x_RK = activations(3, 256)
    expected_RN = multiply(weight, x_RK)
    x_RK[1, 100] = bad
    got_RN = multiply(weight, x_RK)
    assert not np.isfinite(got_RN[1]).any()
    np.testing.assert_array_equal(got_RN[[0, 2]], expected_RN[[0, 2]])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("magnitude", [0.0, -0.0, 1e-45, 1e-38, 1e-31])
def test_groups_too_small_to_scale_are_zero(magnitude: float, isa: int) -> None:
    select_isa(isa)
    weight = random_weight(T.Q4_1, F.U4_OFFSET, 16, 64)
    x_RK = np.full((1, 64), magnitude, np.float32)
    assert (multiply(weight, x_RK) == 0).all()
    x_RK[0, 32:] = 1
    expected_N = weight.rows(range(16))[:, 32:].astype(np.float64).sum(1)
    np.testing.assert_allclose(multiply(weight, x_RK)[0], expected_N, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("source_type", FLOAT_TYPES)
@pytest.mark.parametrize(("weight_format", "levels"), [(F.U8, 254), (F.U4_OFFSET, 15)])
def test_float_matrices_are_quantized_to_the_nearest_level(
    weight_format: WeightFormat, levels: int, source_type: SourceType
) -> None:
    n, k = 33, 96
    stored = stored_matrix(source_type, n, k)
    w_NG = dequantize(stored, source_type, torch.float32).numpy().reshape(n, 3, 32)
    got_NG = packed(stored, source_type, weight_format, k).rows(range(n)).reshape(n, 3, 32)
    is_symmetric = weight_format is F.U8
    span = 2 * np.abs(w_NG).max(2) if is_symmetric else w_NG.max(2) - w_NG.min(2)
    uniform_noise = span / levels / np.sqrt(12)
    error = np.sqrt(((got_NG - w_NG) ** 2).mean(2))
    assert error.mean() <= 1.05 * uniform_noise.mean()
    assert (np.abs(got_NG - w_NG).max(2) <= 0.16 * span).all()


def test_constant_and_zero_groups_quantize_to_themselves() -> None:
    w_NK = np.zeros((3, 64), np.float32)
    w_NK[1] = -0.25
    w_NK[2, :32] = 1.5
    for weight_format in (F.U8, F.U4_OFFSET):
        weight = packed(w_NK.view(np.uint8), T.F32, weight_format, 64)
        np.testing.assert_allclose(weight.rows(range(3)), w_NK, rtol=1e-3)


def test_each_type_is_packed_in_its_format() -> None:
    allowed = {(t, f) for t in T for f in F if can_pack(t, f)}
    of_floats = (F.BF16, F.BF16_TILES, F.F16, F.F32, F.U8, F.U4_OFFSET)
    floats = {(t, f) for t in FLOAT_TYPES for f in of_floats}
    assert allowed == {(t, f) for t, f in PACKINGS if t != FLOAT8} | floats
    assert [f for f in F if can_pack(FLOAT8, f)] == [F.F8]


@pytest.mark.parametrize("isa", ISAS)
def test_float8_products_are_those_of_bf16_weights(isa: int) -> None:
    """Every code, and an odd number of columns in one group."""
    select_isa(isa)
    k = FLOAT8_GROUP - 1
    stored = stored_matrix(FLOAT8, 75, k)
    stored[:3, :84] = np.arange(252).reshape(3, 84)
    stored[stored & 127 == 127] = 0
    stored[:, k:] = np.frombuffer(np.float32(0.5).tobytes(), np.uint8)
    values_NK = torch.from_numpy(values_of(stored, FLOAT8, k)).to(torch.bfloat16)
    exact = packed(values_NK.view(torch.uint8).numpy(), T.BF16, F.BF16, k)
    x_RK = activations(11, k)
    got_RN, expected_RN = multiply(packed(stored, FLOAT8, F.F8, k), x_RK), multiply(exact, x_RK)
    # AMX adds up bf16 weights in another order.
    scale_R1 = np.abs(expected_RN).max(1, keepdims=True)
    assert np.abs(got_RN - expected_RN).max() <= 1e-5 * scale_R1.max()
    if isa != AMX:
        np.testing.assert_array_equal(got_RN, expected_RN)


def test_scales_of_mxfp4_and_of_a_whole_nvfp4_matrix_may_have_any_magnitude() -> None:
    stored = np.zeros((2, 17), np.uint8)
    stored[:, 1:] = 0x27
    for exponent in (0, 1, 100, 250):
        stored[:, 0] = exponent
        weight = packed(stored, T.MXFP4, F.MXFP4, 32)
        expected = np.ldexp(np.float32([6, 1]), exponent - 127).repeat(16)
        np.testing.assert_array_equal(weight.rows([1])[0], expected)
    weight = packed(stored_matrix(T.NVFP4, 2, 64), T.NVFP4, F.NVFP4, 64)
    rows = weight.rows([0, 1])
    weight.scale = 2.0**-40
    np.testing.assert_array_equal(weight.rows([0, 1]), rows * np.float32(2.0**-40))
    x_RK = np.ones((1, 64), np.float32)
    np.testing.assert_allclose(multiply(weight, x_RK)[0], weight.rows([0, 1]).sum(1), rtol=1e-5)


@pytest.mark.parametrize(
    ("source_type", "weight_format", "place", "code"),
    [(T.MXFP4, F.MXFP4, 0, 255), (FLOAT8, F.F8, 5, 0x7F), (FLOAT8, F.F8, 5, 0xFF)],
)
def test_codes_of_nan_are_not_packed(
    source_type: int, weight_format: WeightFormat, place: int, code: int
) -> None:
    stored = stored_matrix(source_type, 3, 64)
    weight = allocate_packed(weight_format, 3, 64, WeightMemory(), FLOAT8_GROUP)
    assert pack_rows(weight, source_type, stored)
    stored[1, place] = code
    assert not pack_rows(weight, source_type, stored)


def test_a_matrix_may_have_rows_of_several_sources() -> None:
    first, second = stored_matrix(T.Q4_1, 20, 64, seed=3), stored_matrix(T.Q4_1, 13, 64, seed=4)
    weight = allocate_packed(F.U4_OFFSET, 33, 64, WeightMemory())
    pack_rows(weight, T.Q4_1, second, first_row=20)
    pack_rows(weight, T.Q4_1, first)
    whole = packed(np.concatenate((first, second)), T.Q4_1, F.U4_OFFSET, 64)
    np.testing.assert_array_equal(weight.array, whole.array)
