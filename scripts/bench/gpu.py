"""What one GPU does with this engine's worker, beside what it can do: decode, prefill, idle time, attention, the start.

    scripts/bench/run gpu [--json FILE] [--no-serving]
    scripts/bench/run gpu --device cpu --tiny

Weights are made up, in the shapes of Llama-3.1-8B and Qwen3-0.6B. The limits are measured in the same run: a copy on the
device, and a bfloat16 product. With --tiny it only shows that the program works.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engine.protocol.config import Device
from local_server import local_server
from on_gpu import limits
from on_gpu.shapes import SHAPES, TINY_SHAPES, Shape
from on_gpu.stepping import Stepping

GIB = 1024**3


@dataclass(frozen=True)
class Load:
    """What is measured of each shape; numbers of requests, tokens and steps."""

    decodes: tuple[tuple[int, int], ...] = ((1, 256), (64, 1024), (256, 2048))
    idle_batch: int = 64
    prompt: int = 8192
    steps: int = 100
    copied_bytes: int = 4 * GIB
    product: int = 8192


TINY = Load(((1, 8), (2, 16)), 2, 24, 3, 1 << 20, 64)


def measure_shape(
    shape: Shape, load: Load, device: Device, directory: Path, bandwidth: float, flops: float
) -> dict[str, Any]:
    max_context = max(context for _, context in load.decodes)
    stepping = Stepping(
        shape,
        directory,
        device=device,
        max_num_seqs=max(batch for batch, _ in load.decodes),
        max_model_len=max(max_context, load.prompt) + 256,
        max_num_batched_tokens=load.prompt,
    )
    report: dict[str, Any] = {"start_s": stepping.seconds, "num_blocks": stepping.num_blocks}
    if stepping.profile is not None:
        report["memory"] = asdict(stepping.profile)
    for batch, context in load.decodes:
        seconds = stepping.decode(batch, context, load.steps)
        ideal = shape.decode_bytes(batch, context + load.steps // 2) / bandwidth
        report[f"decode {batch} x {context}"] = {
            "step_ms": 1e3 * seconds,
            "tokens_per_s": batch / seconds,
            "of_roofline": ideal / seconds,
        }
    seconds = stepping.prefill(load.prompt, 3)
    report[f"prefill {load.prompt}"] = {
        "step_ms": 1e3 * seconds,
        "tokens_per_s": load.prompt / seconds,
        "of_matmul": shape.prefill_flops(load.prompt) / seconds / flops,
    }
    context = load.decodes[-1][1] // 2
    report[f"idle at {load.idle_batch}"] = stepping.idle_share(load.idle_batch, context, load.steps)
    report["waits in two steps"] = stepping.num_waits(load.idle_batch, context)
    return report


def measure_serving(shape: Shape, directory: Path, device: Device) -> dict[str, float]:
    """Seconds from the command to the first token that the server generated."""
    path = shape.write(directory, 4096)
    begin = time.perf_counter()
    arguments = [str(path), "--load-format", "dummy", "--device", device.value]
    with local_server([*arguments, "--cpu-backend", "torch", "--max-num-seqs", "64"]):
        return {"ready_s": time.perf_counter() - begin}


def attention(shape: Shape) -> dict[str, Any]:
    """The attention kernels alone, of one layer, beside torch's; without a GPU interpreted, in another shape."""
    heads = [str(n) for n in (shape.num_heads, shape.num_kv_heads, shape.head_dim)]
    program = Path(__file__).parent / "gpu_attention.py"
    command = [sys.executable, str(program), "--json", "--heads", *heads]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    return {case.pop("case"): case for case in cases}


def attempt(name: str, measure: Callable[[], Any]) -> Any:
    """What one measurement says; one that fails must not cost the others."""
    print(f"{name} …", flush=True)
    begin = time.perf_counter()
    try:
        result = measure()
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    print(f"  {time.perf_counter() - begin:.1f} s", flush=True)
    return result


def lines(report: Any, indent: str = "") -> list[str]:
    found = []
    for name, value in report.items():
        if isinstance(value, dict):
            found += [f"{indent}{name}", *lines(value, indent + "  ")]
        else:
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            found.append(f"{indent}{name:{30 - len(indent)}s} {shown}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a few steps of a toy model")
    parser.add_argument("--no-serving", action="store_true", help="only what is in this process")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    device, torch_device = Device(arguments.device), torch.device(arguments.device)
    load, shapes = (TINY, TINY_SHAPES) if arguments.tiny else (Load(), SHAPES)
    is_cuda = device is Device.CUDA
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "torch": torch.__version__,
    }
    bandwidth = limits.copy_bandwidth(torch_device, load.copied_bytes)
    flops = limits.matmul_flops(torch_device, load.product)
    report["limits"] = {
        "copy_bytes_per_s": bandwidth,
        "matmul_flops": flops,
        "upload_bytes_per_s": limits.upload_bandwidth(torch_device, load.copied_bytes // 4),
    }
    with tempfile.TemporaryDirectory() as directory:
        for name, shape in shapes.items():
            path = Path(directory, name)
            measure = partial(measure_shape, shape, load, device, path, bandwidth, flops)
            report[name] = attempt(name, measure)
            report[f"{name}, attention"] = attempt(f"{name}, attention", partial(attention, shape))
            if not arguments.no_serving:
                served = partial(measure_serving, shape, Path(directory, f"{name}.served"), device)
                report[f"{name}, served"] = attempt(f"{name}, served", served)
            if arguments.json:
                arguments.json.write_text(json.dumps(report))
    print("\n".join(lines(report)))


if __name__ == "__main__":
    main()
