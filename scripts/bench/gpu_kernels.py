"""Measure the Triton kernels other than attention on a GPU, against the roofline of the same run.

    scripts/bench/run gpu_kernels [--rows 14336] [--columns 4096] [--vocab 151936] [--only linear]

Each case is a JSON object on a line; `gpu --only kernels` shows them as a table. A kernel's roofline fraction is a
ratio of times. The numerator is the time for its bytes at the speed of a copy, or for its operations at the speed of a
bf16 product, whichever is longer. The denominator is the time that it took. Its error is the largest difference from
float32 on the same device, relative to the largest number; for sampling, it is the share of rows with another token
than torch's. Without a GPU, the cases are tiny and the kernels interpreted, which only shows that the program works.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

from engine.protocol.sampling_params import SamplingParams  # noqa: E402
from engine.workers.cuda.float8 import Rounding, Rows  # noqa: E402
from engine.workers.cuda.gated_activation import gated_activation  # noqa: E402
from engine.workers.cuda.norm import rms_norm  # noqa: E402
from engine.workers.cuda.quantized.linear import QuantizedLinear  # noqa: E402
from engine.workers.cuda.sampling import choose_tokens  # noqa: E402
from engine.workers.loaders.quantization.matrix import ActivationScheme, QuantizedMatrix  # noqa: E402
from engine.workers.sampling import SamplingMetadata, TorchSampler  # noqa: E402
from engine.workers.sampling import choose_tokens as torch_choose_tokens  # noqa: E402
from on_gpu.limits import copy_bandwidth, matmul_flops  # noqa: E402
from on_gpu.reporting import Reporter, add_done  # noqa: E402

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
# Triton's interpreter cannot multiply bfloat16 matrices.
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
NAME = f"{DTYPE}".removeprefix("torch.")
REPEATS = 50 if HAS_GPU else 1
HEAD_START = 2_000_000
"""GPU cycles, about a millisecond, that the host may take to launch a call before the GPU starts it."""


@dataclass(frozen=True, slots=True)
class Case:
    """A measured call. `gigabytes` and `teraflops` are its minimum cost. `error` returns the error of its result."""

    name: str
    run: Callable[[], object]
    error: Callable[[], float]
    gigabytes: float
    teraflops: float = 0.0


def seconds(run: Callable[[], object]) -> float:
    """Return the median duration of `REPEATS` calls.

    Before each call other data is read into the L2 cache, because lines that were written would first have to leave it.
    The call starts only when all its kernels are queued.
    """
    if not HAS_GPU:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    run()
    other = torch.zeros(32 << 20, dtype=torch.int64, device=DEVICE)
    times = []
    for _ in range(REPEATS):
        other.sum()
        torch.cuda._sleep(HEAD_START)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return float(statistics.median(times))


def numbers(rows: Rows) -> torch.Tensor:
    """Return the values of quantized rows in float32."""
    if isinstance(rows, torch.Tensor):
        return rows.float()
    values_TD, scale_TG = rows
    if scale_TG is None:
        return values_TD.float()
    return values_TD.float() * scale_TG.repeat_interleave(
        values_TD.shape[1] // scale_TG.shape[1], 1
    )


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).abs().max() / expected.abs().max())


def linear_error(linear: QuantizedLinear, matrix: QuantizedMatrix, x: torch.Tensor) -> float:
    rows = x if linear.rounding is None else linear.rounding(x)
    return apart(linear(x), numbers(rows) @ matrix.dequantize(torch.float32).T)


def norm_error(x: torch.Tensor, block: torch.Tensor, rounding: Rounding | None) -> float:
    weight = torch.ones(x.shape[1], device=DEVICE)
    expected = torch.nn.functional.rms_norm((x + block).float(), x.shape[1:], eps=1e-6)
    found = rms_norm(x.clone(), weight, 1e-6, block_TD=block, rounding=rounding)
    return apart(numbers(found), expected)


def activation_error(gate_up: torch.Tensor, rounding: Rounding | None) -> float:
    gate, up = gate_up.float().chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    return apart(numbers(gated_activation("silu", gate_up, rounding)), expected)


def sampling_error(
    logits: torch.Tensor, metadata: SamplingMetadata, positions: npt.NDArray[np.int32]
) -> float:
    expected = torch_choose_tokens(logits, metadata, positions)
    found = choose_tokens(logits, metadata, positions)
    return float((found != expected).float().mean())


def matrices(rows: int, columns: int) -> Iterator[tuple[str, QuantizedMatrix]]:
    def integers(bits: int, group: int, **others: Any) -> QuantizedMatrix:
        values = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8, device=DEVICE)
        scale = torch.rand(rows, columns // group, device=DEVICE).half()
        return QuantizedMatrix(values, bits, scale, group, **others)

    def float8(group: int, activations: ActivationScheme) -> QuantizedMatrix:
        values = torch.randn(rows, columns, device=DEVICE).to(torch.float8_e4m3fn)
        scale = torch.rand(rows, columns // group, device=DEVICE)
        return QuantizedMatrix(values, None, scale, group, activations=activations)

    # The kernel that --batch-invariant uses, for comparison with torch's products.
    weight = torch.randn(rows, columns, device=DEVICE).to(DTYPE)
    yield (
        f"unscaled {NAME}",
        QuantizedMatrix(weight, None, torch.ones(rows, 1, device=DEVICE), columns),
    )
    groups = columns // 128
    zeros = torch.randint(0, 16, (rows, groups), dtype=torch.uint8, device=DEVICE)
    offsets = torch.rand(rows, columns // 32, device=DEVICE).half()
    yield "AWQ, GPTQ 4 bits", integers(4, 128, zero_OG=zeros)
    yield "Q4_K", integers(4, 32, offset_OG=offsets)
    yield "Q6_K", integers(6, 16, zero_OG=32)
    yield "int8", integers(8, columns, zero_OG=128)
    yield "fp8", float8(columns, ActivationScheme.TOKEN)
    yield "fp8 blocks", float8(128, ActivationScheme.GROUP)


def error_of_product(x: torch.Tensor, weight: torch.Tensor) -> float:
    return apart(x @ weight.T, x.float() @ weight.float().T)


def linear_cases(rows: int, columns: int) -> Iterator[Case]:
    tokens = (1, 16, 64, 2048) if HAS_GPU else (1, 20)
    weight = torch.randn(rows, columns, device=DEVICE).to(DTYPE)
    for count in tokens:
        x = torch.randn(count, columns, device=DEVICE).to(DTYPE)
        flops = 2 * count * rows * columns / 1e12
        traffic = count * (rows + columns) * DTYPE.itemsize

        yield Case(
            f"torch {NAME} x {count}",
            partial(torch.nn.functional.linear, x, weight),
            partial(error_of_product, x, weight),
            (weight.nbytes + traffic) / 1e9,
            flops,
        )
    for name, matrix in matrices(rows, columns):
        bits = matrix.bits or 8 * matrix.values_OD.element_size()
        size = rows * columns * bits / 8 + matrix.scale_OG.nbytes
        linear = QuantizedLinear([matrix], None, DTYPE)
        for count in tokens:
            x = torch.randn(count, columns, device=DEVICE).to(DTYPE)
            traffic = count * (rows + columns) * DTYPE.itemsize

            # With float8 activations, twice the operations of bf16 are possible.
            speedup = 1 if linear.rounding is None else 2
            flops = 2 * count * rows * columns / 1e12 / speedup
            yield Case(
                f"{name} x {count}",
                partial(linear, x),
                partial(linear_error, linear, matrix, x),
                (size + traffic) / 1e9,
                flops,
            )


def row_cases(rows: int, columns: int) -> Iterator[Case]:
    for tokens in (64, 8192) if HAS_GPU else (2,):
        x, block = torch.randn(2, tokens, columns, device=DEVICE).to(DTYPE)
        weight = torch.ones(columns, device=DEVICE)
        gate_up = torch.randn(tokens, 2 * rows, device=DEVICE).to(DTYPE)
        for rounding, out_bytes in ((None, DTYPE.itemsize), (Rounding(), 1)):
            norm = partial(rms_norm, x, weight, 1e-6, block_TD=block, rounding=rounding)
            activation = partial(gated_activation, "silu", gate_up, rounding)
            suffix = f" x {tokens}" + (" to float8" if rounding else "")

            moved = tokens * columns * (3 * DTYPE.itemsize + out_bytes)
            error = partial(norm_error, x.clone(), block, rounding)
            yield Case("add, norm" + suffix, norm, error, moved / 1e9)
            moved = tokens * rows * (2 * DTYPE.itemsize + out_bytes)
            error = partial(activation_error, gate_up, rounding)
            yield Case("silu, multiply" + suffix, activation, error, moved / 1e9)


def sampling_cases(vocab_size: int) -> Iterator[Case]:
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "temperature": {},
        "top-k 50": {"top_k": 50},
        "top-p 0.9": {"top_p": 0.9},
        "top-p 0.99, hot": {"top_p": 0.99, "temperature": 3.0},
    }
    for num_rows in (1, 64, 256) if HAS_GPU else (2,):
        logits = torch.randn(num_rows, vocab_size, device=DEVICE) * 3
        positions = np.zeros(num_rows, np.int32)
        for name, fields in kinds.items():
            sampler = TorchSampler(num_rows, vocab_size, DEVICE)
            for slot in range(num_rows):
                params = SamplingParams(seed=slot, **fields)
                sampler.add_request(slot, params, np.zeros(1, np.int32), ())
            metadata = sampler.describe(np.arange(num_rows, dtype=np.int32))

            yield Case(
                f"{name} x {num_rows}",
                partial(choose_tokens, logits, metadata, positions),
                partial(sampling_error, logits, metadata, positions),
                logits.nbytes / 1e9,
            )


def figures(case: Case, bandwidth: float, speed: float) -> dict[str, float]:
    """Return the speed of a case as absolute figures and as a share of the roofline, and its error."""
    took = seconds(case.run)
    least = max(case.gigabytes / bandwidth, case.teraflops / speed)
    return {
        "microseconds": took * 1e6,
        "gb_per_s": case.gigabytes / took,
        "tflops": case.teraflops / took,
        "roofline": least / took,
        "error": case.error(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=14336 if HAS_GPU else 80)
    parser.add_argument("--columns", type=int, default=4096 if HAS_GPU else 256)
    parser.add_argument("--vocab", type=int, default=151936 if HAS_GPU else 500)
    parser.add_argument("--only", choices=("linear", "rows", "sampling"))
    parser.add_argument("--case", nargs="+", metavar="NAME", help="these cases")
    parser.add_argument(
        "--once", action="store_true", help="only launch the kernels, for a profiler"
    )
    add_done(parser)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    cases = {
        "linear": lambda: linear_cases(arguments.rows, arguments.columns),
        "rows": lambda: row_cases(arguments.rows, arguments.columns),
        "sampling": lambda: sampling_cases(arguments.vocab),
    }
    chosen = (
        case
        for kind in ([arguments.only] if arguments.only else cases)
        for case in cases[kind]()
        if not arguments.case or case.name in arguments.case
    )
    if arguments.once:
        for case in chosen:
            for _ in range(3):
                case.run()
        return
    bandwidth = copy_bandwidth(DEVICE, 1 << (30 if HAS_GPU else 20)) / 1e9
    speed = matmul_flops(DEVICE, 8192 if HAS_GPU else 64) / 1e12
    reporter = Reporter(arguments.done)
    for case in chosen:
        reporter.say(case.name, partial(figures, case, bandwidth, speed))


if __name__ == "__main__":
    main()
