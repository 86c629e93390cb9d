"""Every kernel compiles for Hopper within the resources of one multiprocessor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from support.gpu.triton_compile import KernelResources, compile_for_hopper
from support.gpu.wgmma_operands import overwritten_operands

if TYPE_CHECKING:
    import torch
    from engine.workers.loaders.quantization.matrix import ActivationScheme, QuantizedMatrix

# Compilation takes minutes on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROWS, COLUMNS = 1024, 4096


def launch_norms_and_samplers() -> None:
    import numpy as np
    import torch
    from engine.workers.cuda.float8 import Rounding
    from engine.workers.cuda.gated_activation import GATED_ACTIVATIONS, gated_activation
    from engine.workers.cuda.norm import rms_norm
    from engine.workers.cuda.rotary_tables import rotary_tables
    from engine.workers.cuda.sampling import append_tokens, choose_greedy, choose_tokens
    from engine.workers.layers.rope import RopeSpec, RotaryEmbedding
    from engine.workers.sampling import SamplingMetadata
    from engine.workers.sampling.state import SamplingState

    # Llama-3.1-8B.
    x = torch.zeros(4, 4096).bfloat16()
    gate_up = torch.zeros(4, 2 * 14336).bfloat16()
    for rounding in (None, Rounding(), Rounding(128), Rounding(input_scale=0.1)):
        rms_norm(x, torch.ones(4096), 1e-6, block_TD=x.clone(), rounding=rounding)
        gated_activation("silu", gate_up, rounding)
    for name in GATED_ACTIVATIONS:
        gated_activation(name, gate_up)

    for vocab_size in (32000, 151936):
        state = SamplingState(2, vocab_size, torch.device("cpu"))
        metadata = SamplingMetadata.from_state(state, np.arange(2))
        choose_tokens(torch.zeros(2, vocab_size), metadata, np.zeros(2, np.int32))
        tokens = choose_greedy(torch.zeros(2, vocab_size))
    indices = torch.zeros(2, dtype=torch.int32)
    append_tokens(torch.zeros(3, 9, dtype=torch.int32), indices, tokens)
    for axes in ((), (0, 1, 2) * 20 + (0,) * 4):
        rope = RotaryEmbedding(
            RopeSpec(1e4, 128, axes=axes),
            max_model_len=9,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )
        rotary_tables(rope, torch.zeros(2, 3, dtype=torch.int32) if axes else indices)


def launch_adapters() -> None:
    import torch
    from engine.workers.cuda.low_rank import TritonLowRank
    from engine.workers.models.lora.adapters import LoraAdapters

    for max_rank in (16, 64):
        changes = TritonLowRank((1024, 256), 4096, 2, max_rank, torch.bfloat16, torch.device("cpu"))
        for num_tokens in (4, 500):
            adapters = LoraAdapters(2, max_rank, 4)
            adapters.device_number_T = torch.zeros(num_tokens, dtype=torch.int32)
            x = torch.zeros(num_tokens, 4096).bfloat16()
            changes.add(torch.zeros(num_tokens, 1280).bfloat16(), x, adapters)


def quantized_matrix(
    bits: int | None,
    group_size: int,
    activations: ActivationScheme | None = None,
    *,
    float_type: torch.dtype | None = None,
    zeros: bool = False,
    offsets: bool = False,
) -> QuantizedMatrix:
    import torch
    from engine.workers.loaders.quantization.matrix import ActivationScheme, QuantizedMatrix

    groups = COLUMNS // group_size
    return QuantizedMatrix(
        torch.zeros(ROWS, COLUMNS).to(torch.uint8 if bits else float_type or torch.float8_e4m3fn),
        bits,
        torch.zeros(ROWS, groups, dtype=torch.float16 if bits else torch.float32),
        group_size,
        torch.zeros(ROWS, groups, dtype=torch.uint8) if zeros else 8,
        torch.zeros(ROWS, groups, dtype=torch.float16) if offsets else None,
        activations=activations or ActivationScheme.NONE,
    )


def launch_products() -> None:
    import torch
    from engine.workers.cuda.quantized.linear import QuantizedLinear
    from engine.workers.loaders.quantization.matrix import ActivationScheme

    # Each number of tokens has a different tile. The smallest and the largest need the most of some resource.
    every, extremes = (1, 20, 50, 100, 500), (1, 100, 500)
    for kind, lengths in (
        (quantized_matrix(4, 128, zeros=True), every),
        (quantized_matrix(4, 32), extremes),
        (quantized_matrix(4, 32, offsets=True), extremes),
        (quantized_matrix(6, 16), extremes),
        (quantized_matrix(8, COLUMNS), extremes),
        (quantized_matrix(None, 128, ActivationScheme.GROUP), extremes),
        (quantized_matrix(None, COLUMNS, ActivationScheme.TOKEN), extremes),
        (quantized_matrix(None, COLUMNS), extremes),
        (quantized_matrix(None, COLUMNS, float_type=torch.bfloat16), every),
    ):
        linear = QuantizedLinear([kind], torch.zeros(ROWS).bfloat16(), torch.bfloat16)
        for num_tokens in lengths:
            linear(torch.zeros(num_tokens, COLUMNS).bfloat16())


def launch_experts() -> None:
    import torch
    from engine.workers.cuda.experts.choosing import choose_experts, router_logits
    from engine.workers.cuda.experts.grouped_linear import GroupedLinear, combine
    from engine.workers.cuda.experts.ordering import order_choices
    from engine.workers.layers.specs.experts import ExpertsSpec
    from msgspec.structs import replace

    for kind in (
        quantized_matrix(4, 128, zeros=True),
        quantized_matrix(None, COLUMNS, float_type=torch.bfloat16),
    ):
        grouped = GroupedLinear(kind, 8, None, torch.bfloat16, is_batch_invariant=False)
        for num_tokens in (8, 4000):
            x = torch.zeros(num_tokens, COLUMNS).bfloat16()
            grouped(x, torch.full((8,), num_tokens, dtype=torch.int32))
    combine(x, torch.arange(4000), torch.zeros(500, 8))
    order_choices(torch.zeros(200, 8, dtype=torch.int64), 128)
    router_logits(x[:2], torch.zeros(128, COLUMNS))
    choose_experts(ExpertsSpec(128, 8, 768), None, None, torch.zeros(4, 128))
    grouped_spec = ExpertsSpec(
        *(384, 8, 768), scoring="sigmoid", num_groups=8, num_groups_per_token=4
    )
    for score in ("best", "best two"):
        spec = replace(grouped_spec, group_score=score)
        choose_experts(spec, None, torch.zeros(384), torch.zeros(4, 384))
    choose_experts(
        replace(grouped_spec, scoring="sqrt softplus", num_groups=1, corrects_logits=True),
        *(torch.zeros(384), torch.zeros(384), torch.zeros(4, 384)),
    )


NUM_KERNELS = {
    launch_norms_and_samplers: 10,
    launch_adapters: 2,
    launch_products: 5,
    launch_experts: 6,
}
"""The number of kernels that each function launches, in all their variants."""


@pytest.mark.parametrize("launch", NUM_KERNELS, ids=lambda launch: launch.__name__)
def test_every_kernel_fits_on_a_multiprocessor(launch: Callable[[], None]) -> None:
    kernels = compile_for_hopper(__file__, launch.__name__)
    assert len({kernel.name for kernel in kernels}) == NUM_KERNELS[launch]
    assert not [kernel for kernel in kernels if not kernel.fits]
    # Compilers may differ by a few spilled registers.
    assert not [kernel for kernel in kernels if kernel.stack_bytes > 64]
    assert not [(kernel.name, kernel.overwritten) for kernel in kernels if kernel.overwritten]
    if launch is launch_products:
        check_products(kernels)


def check_products(kernels: list[KernelResources]) -> None:
    """Check that products use the same instructions for any number of tokens, and load scales and zero points once.

    A thread that loads them for every element that it multiplies by them needs 32 to 96 loads.
    """
    products = {tuple(kernel.products) for kernel in kernels if kernel.name == "linear_kernel"}
    assert products == {("wgmma k16.f32.bf16.bf16",), ("wgmma k32.f32.e4m3.e4m3",)}
    loading = [kernel for kernel in kernels if kernel.name in ("linear_kernel", "words_kernel")]
    assert loading and not [kernel for kernel in loading if kernel.global_loads > 24]


SASS = """
.L_x_0:
        /*0010*/                   LDS.128 R40, [R58] ;
        /*0020*/                   WARPGROUP.ARRIVE ;
        /*0030*/                   HGMMA.64x16x16.F32.BF16 R24, R36, gdesc[UR8], R24 ;
        /*0040*/                   HGMMA.64x16x16.F32.BF16 R24, R40, gdesc[UR8], R24, gsb0 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x{} ;
        /*0060*/              @!P0 BRA `(.L_x_0) ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0080*/                   EXIT ;
"""


def test_an_overwritten_operand_is_detected() -> None:
    assert not overwritten_operands(SASS.format(0))
    (found,) = overwritten_operands(SASS.format(1))
    assert "R40, gdesc" in found and "LDS.128 R40" in found
