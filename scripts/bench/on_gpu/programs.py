"""Other programs whose findings count: the tests of kernels, NVIDIA's compute-sanitizer, and its profiler ncu."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from on_gpu.reporting import Reporter, Skipped

DIRECTORY = Path(__file__).parents[1]
ROOT = DIRECTORY.parents[1]
TESTS = (
    "tests/workers/attention/test_triton_paged.py",
    "tests/workers/attention/test_batch_invariant.py",
    "tests/workers/attention/test_long_prompts.py",
    "tests/workers/cuda",
    "tests/workers/device",
    "tests/workers/execution/test_no_waiting.py",
)
TINY_TESTS = ("tests/workers/cuda/test_rotary_tables.py",)
REQUESTS = tuple(
    f"tests/e2e/{room}/test_{name}.py"
    for room, names in {
        "text": (
            "beam_search",
            "draft_heads",
            "layer_kinds",
            "lora",
            "prompt_embeds",
            "source_text",
        ),
        "pooling": ("classification", "image_embeddings", "lora_pooling", "token_pooling"),
        "media": ("chat_audio", "chat_transcriptions", "images", "qwen_images", "speech_models"),
    }.items()
    for name in names
)
TINY_REQUESTS = ("tests/e2e/text/test_prompt_embeds.py",)
WITHOUT_GPU = "not compile and not hopper and not launches"
"""Tests that need no GPU, of which some take minutes, are not run."""

PROFILES = {
    "decode attention": ("gpu_attention.py", "decode_kernel", "--case", "decode 64 x 2k"),
    "prompt attention": ("gpu_attention.py", "prefill_kernel", "--case", "prefill 8k"),
    "4-bit product, 1 token": (
        "gpu_kernels.py",
        "linear_kernel",
        "--case",
        "AWQ, GPTQ 4 bits x 1",
    ),
    "4-bit product, 64 tokens": (
        "gpu_kernels.py",
        "linear_kernel",
        "--case",
        "AWQ, GPTQ 4 bits x 64",
    ),
    "norm": ("gpu_kernels.py", "_norm_kernel", "--case", "add, norm x 64"),
    "top-p": ("gpu_kernels.py", "_choose_kernel", "--case", "top-p 0.9 x 64"),
}
"""The program, the kernel and the case of each profile."""

METRICS = (
    "Duration",
    "Compute (SM) Throughput",
    "DRAM Throughput",
    "L2 Hit Rate",
    "Achieved Occupancy",
    "Registers Per Thread",
    "Dynamic Shared Memory Per Block",
    "Block Limit Registers",
    "Executed Ipc Active",
)
SECTIONS = (
    "SpeedOfLight",
    "MemoryWorkloadAnalysis",
    "Occupancy",
    "LaunchStats",
    "ComputeWorkloadAnalysis",
)


def run_tests(reporter: Reporter, seconds: float, *, is_tiny: bool) -> None:
    """Run the tests of kernels, which use a GPU if there is one."""
    tests = TINY_TESTS if is_tiny else TESTS
    reporter.say("kernels", lambda: _run_pytest(tests, seconds, "-k", WITHOUT_GPU, is_tiny=is_tiny))


def run_requests(reporter: Reporter, seconds: float, device: str, *, is_tiny: bool) -> None:
    """Run the end-to-end tests of each kind of request, with servers that use the device.

    Each server gets a small KV cache, because as many run at once as there are CPUs.
    """
    tests = TINY_REQUESTS if is_tiny else REQUESTS
    environment = {"TEST_DEVICE": device, "ENGINE_KV_CACHE_MEMORY_BYTES": "256MiB"}
    run = partial(_run_pytest, tests, seconds, is_tiny=is_tiny, **environment)
    reporter.say("kinds of requests", run)


def _run_pytest(
    tests: tuple[str, ...], seconds: float, *options: str, is_tiny: bool, **environment: str
) -> dict[str, Any]:
    """Return how many tests passed. Raises RuntimeError with the names of those that failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider"]
    command += ["--processes", "1" if is_tiny else str(os.cpu_count())]
    command += ["--timeout", str(int(seconds) - 10), *options, *tests]
    text = _output(command, seconds - 5, **environment)
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|error)", text)}
    failed = re.findall(r"^(?:FAILED|ERROR) \S*/(\S+)", text, re.MULTILINE)
    if failed or not counts.get("passed"):
        print(text, file=sys.stderr)
        raise RuntimeError(f"{counts}: {', '.join(failed) or text[-300:]}")
    return {"passed": counts["passed"]}


def run_sanitizer(reporter: Reporter, device: str) -> None:
    """Look for wrong addresses and races in the kernels of a toy model."""
    agreement = [sys.executable, str(DIRECTORY / "on_gpu" / "measure.py"), "agreement"]
    agreement += ["--device", device, "--tiny", "--ways", "bfloat16, eager"]
    for tool in ("memcheck", "racecheck"):
        reporter.say(tool, partial(_sanitize, tool, agreement))


def _sanitize(tool: str, command: list[str]) -> dict[str, Any]:
    sanitizer = _program("compute-sanitizer")
    # Torch's cache of memory would hide an address past the end of a tensor.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    options = ["--tool", tool, "--target-processes", "all"]
    text = _output([sanitizer, *options, *command], 40, **environment)
    found = re.findall(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", text)
    if not found:
        raise RuntimeError(f"no summary: {text[-300:]}")
    return {"errors": sum(map(int, found))}


def run_profiles(reporter: Reporter) -> None:
    """Read the hardware's counters while single kernels run."""
    for name, (program, kernel, *options) in PROFILES.items():
        reporter.say(name, partial(_profile, program, kernel, options))


def _profile(program: str, kernel: str, options: list[str]) -> dict[str, Any]:
    command = [_program("ncu"), "--clock-control", "none", "--csv", "--page", "details"]
    command += [f"--section={section}" for section in SECTIONS]
    # The first launch reads a cold instruction cache.
    command += ["--kernel-name", f"regex:^{kernel}$", "--launch-skip", "1", "--launch-count", "1"]
    python = [sys.executable, str(DIRECTORY / program), "--once", *options]
    text = _output([*command, *python], 30)
    rows = csv.DictReader(line for line in text.splitlines() if line.startswith('"'))
    found = {
        f"{row['Metric Name']} ({row['Metric Unit']})": row["Metric Value"]
        for row in rows
        if row.get("Metric Name") in METRICS
    }
    if not found:
        raise RuntimeError(f"no metrics: {text[-300:]}")
    return found


def _program(name: str) -> str:
    """Return the path of a program of the CUDA toolkit. Raises Skipped if there is none."""
    path = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if path is None:
        raise Skipped(f"{name} is not installed")
    return path


def _output(command: list[str], seconds: float, **environment: str) -> str:
    """Return the program's output, which is also written to the log. Raises TimeoutExpired."""
    result = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        env=os.environ | environment,
    )
    print(result.stdout, file=sys.stderr, flush=True)
    return result.stdout
