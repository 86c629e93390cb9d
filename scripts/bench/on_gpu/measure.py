"""One part of `gpu.py`, in a process of its own: prints a JSON object for each figure as soon as it is known."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Python has this file's folder on its path; what the benchmarks share is one above.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from engine.protocol.config import Device
from on_gpu import limits
from on_gpu.agreement import EAGERLY, Agreement
from on_gpu.reporting import Reporter, Spoiled, add_done
from on_gpu.shapes import SHAPES, TINY_SHAPES, Shape
from on_gpu.stepping import Stepping
from on_gpu.weights import write_weights
from support.server import Server

GIB = 1024**3


@dataclass(frozen=True)
class Load:
    """The measurements of each shape: numbers of requests, tokens and steps."""

    decodes: tuple[tuple[int, int], ...] = ((1, 256), (64, 1024), (256, 2048))
    idle_batch: int = 64
    prompt: int = 8192
    steps: int = 100
    copied_bytes: int = 4 * GIB
    product: int = 8192


TINY = Load(((1, 8), (2, 16)), 2, 24, 3, 1 << 20, 64)


def measure_limits(reporter: Reporter, load: Load, device: torch.device) -> None:
    say = reporter.say
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    say("device", lambda: {"name": name, "torch": torch.__version__})
    say("copy", lambda: {"bytes_per_s": limits.copy_bandwidth(device, load.copied_bytes)})
    say("matmul", lambda: {"flops": limits.matmul_flops(device, load.product)})
    upload = partial(limits.upload_bandwidth, device, load.copied_bytes // 4)
    say("upload", lambda: {"bytes_per_s": upload()})


def measure_agreement(reporter: Reporter, arguments: argparse.Namespace, directory: Path) -> None:
    agreement = Agreement(directory, Device(arguments.device), is_tiny=arguments.tiny)
    try:
        for way in [arguments.eagerly] if arguments.eagerly else agreement.ways:
            reporter.say(way, partial(agreement.measure, way))
    except Spoiled as spoiled:
        if not arguments.done and EAGERLY not in spoiled.case:
            # Once more so that the traceback shows what failed, not what first waited for it.
            subprocess.run(
                [sys.executable, *sys.argv, "--eagerly", spoiled.case + EAGERLY],
                env=os.environ | {"CUDA_LAUNCH_BLOCKING": "1"},
            )
        raise


def measure_model(
    reporter: Reporter,
    shape: Shape,
    load: Load,
    device: Device,
    directory: Path,
    known: dict[str, Any],
) -> None:
    """`known` are the limits, as far as they could be measured."""
    say = reporter.say
    bandwidth = known.get("copy", {}).get("bytes_per_s", float("nan"))
    flops = known.get("matmul", {}).get("flops", float("nan"))
    max_context = max(context for _, context in load.decodes)
    stepping = Stepping(
        shape,
        directory,
        device=device,
        max_num_seqs=max(batch for batch, _ in load.decodes),
        max_model_len=max(max_context, load.prompt) + 256,
        max_num_batched_tokens=load.prompt,
    )
    say("start_s", lambda: dict(stepping.seconds))
    profile = stepping.profile
    say(
        "memory", lambda: {"num_blocks": stepping.num_blocks} | (asdict(profile) if profile else {})
    )

    def decode(batch: int, context: int) -> dict[str, float]:
        seconds = stepping.decode(batch, context, load.steps)
        ideal = shape.decode_bytes(batch, context + load.steps // 2) / bandwidth
        return {
            "step_ms": 1e3 * seconds,
            "tokens_per_s": batch / seconds,
            "of_roofline": ideal / seconds,
        }

    def prefill() -> dict[str, float]:
        seconds = stepping.prefill(load.prompt, 3)
        return {
            "step_ms": 1e3 * seconds,
            "tokens_per_s": load.prompt / seconds,
            "of_matmul": shape.prefill_flops(load.prompt) / seconds / flops,
        }

    for batch, context in load.decodes:
        say(f"decode {batch} x {context}", partial(decode, batch, context))
    say(f"prefill {load.prompt}", prefill)
    context = load.decodes[-1][1] // 2
    trace = partial(stepping.trace, load.idle_batch, context, load.steps)
    say(f"trace at {load.idle_batch}", trace)
    say("trace at 1", partial(stepping.trace, 1, load.decodes[0][1], load.steps))
    say("waits in two steps", partial(stepping.waits, load.idle_batch, context))


def seconds_to_serve(path: Path, device: Device, *options: str) -> dict[str, float]:
    """Measure the time from the command to the first generated token."""
    begin = time.perf_counter()
    arguments = [str(path), "--device", device.value, *options]
    with Server(*arguments, "--cpu-backend", "torch", "--max-num-seqs", "64"):
        return {"s": time.perf_counter() - begin}


def measure_serving(reporter: Reporter, shape: Shape, device: Device, directory: Path) -> None:
    path = shape.write(directory, 4096)
    # This start also compiles the kernels.
    without_weights = partial(seconds_to_serve, path, device, "--load-format", "dummy")
    reporter.say("first start, without weights", without_weights)

    def start() -> dict[str, float]:
        begin = time.perf_counter()
        num_bytes = write_weights(shape, directory)
        # They have just been written, so they are in the page cache.
        written = {"written_bytes": num_bytes, "written_s": time.perf_counter() - begin}
        return {**seconds_to_serve(path, device), **written}

    reporter.say("start", start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("limits", "agreement", "model", "served"))
    parser.add_argument("shape", nargs="?")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--limits", type=json.loads, default={})
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--eagerly", metavar="WAY", help="of agreement only this, without graphs")
    add_done(parser)
    arguments = parser.parse_args()
    reporter = Reporter(arguments.done, share_state=arguments.part in ("agreement", "model"))
    device = Device(arguments.device)
    load, shapes = (TINY, TINY_SHAPES) if arguments.tiny else (Load(), SHAPES)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name, "model")
        if arguments.part == "limits":
            measure_limits(reporter, load, torch.device(arguments.device))
        elif arguments.part == "agreement":
            measure_agreement(reporter, arguments, directory)
        elif arguments.part == "model":
            shape = shapes[arguments.shape]
            measure_model(reporter, shape, load, device, directory, arguments.limits)
        else:
            measure_serving(reporter, shapes[arguments.shape], device, directory)


if __name__ == "__main__":
    main()
