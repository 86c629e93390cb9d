"""Run one part of `gpu.py`, in its own process, and print each figure as a JSON object as soon as it is measured."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Python adds this file's folder to its path; the code that the benchmarks share is one folder above.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from engine.protocol.config import Device
from msgspec.structs import asdict
from on_gpu import limits, programs
from on_gpu.agreement import EAGERLY, Agreement, repeats
from on_gpu.plan import LIMITS
from on_gpu.reporting import Reporter, Skipped, Spoiled, add_done
from on_gpu.shapes import SHAPES, TINY_SHAPES, Shape
from on_gpu.stepping import Stepping
from on_gpu.weights import write_weights
from support.servers.server import COMMAND, Server

GIB = 1024**3


@dataclass(frozen=True)
class Load:
    """The amount of work for each shape: the numbers of requests, tokens and steps."""

    decodes: tuple[tuple[int, int], ...] = ((1, 256), (64, 1024), (256, 2048))
    mixed: tuple[int, int] = (96, 64)
    idle_batch: int = 64
    prompt: int = 8192
    steps: int = 100
    copied_bytes: int = 4 * GIB
    product: int = 8192


TINY = Load(((1, 8), (2, 16), (4, 16)), (2, 8), 2, 24, 3, 1 << 20, 64)


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
        for way in arguments.ways or agreement.ways:
            reporter.say(way, partial(agreement.measure, way))
    except Spoiled as spoiled:
        if not arguments.done and EAGERLY not in spoiled.case:
            # Run it again with blocking launches, so that the traceback shows the launch that failed and not a later
            # wait.
            subprocess.run(
                [sys.executable, *sys.argv, "--ways", spoiled.case + EAGERLY],
                env=os.environ | {"CUDA_LAUNCH_BLOCKING": "1"},
            )
        raise


def measure_families(arguments: argparse.Namespace) -> None:
    # It needs transformers and the test folder, which the other parts do not.
    from on_gpu import families

    names = arguments.ways or (families.NAMES[:2] if arguments.tiny else families.NAMES)
    families.compare(
        [name for name in names if name not in arguments.done], Device(arguments.device)
    )


def measure_repeats(reporter: Reporter, arguments: argparse.Namespace, directory: Path) -> None:
    for is_eager in (True, False):
        name = "eager" if is_eager else "graphs"
        run = partial(
            repeats, directory, Device(arguments.device), is_tiny=arguments.tiny, is_eager=is_eager
        )
        reporter.say(name, run)


def open_stepping(shape: Shape, load: Load, device: Device, directory: Path) -> Stepping:
    max_context = max(context for _, context in load.decodes)
    return Stepping(
        shape,
        directory,
        device=device,
        max_num_seqs=max(batch for batch, _ in load.decodes),
        max_model_len=max(max_context, load.prompt) + 256,
        max_num_batched_tokens=load.prompt,
    )


def measure_decode(
    stepping: Stepping, shape: Shape, load: Load, known: dict[str, Any], batch: int, context: int
) -> dict[str, float]:
    """Measure decode steps. `known` are the limits of the device, as far as they could be measured."""
    bandwidth = known.get("copy", {}).get("bytes_per_s", float("nan"))
    seconds, host_seconds = stepping.decode(batch, context, load.steps)
    ideal = shape.decode_bytes(batch, context + load.steps // 2) / bandwidth
    return {
        "step_ms": 1e3 * seconds,
        "tokens_per_s": batch / seconds,
        "of_roofline": ideal / seconds,
        "host_us": 1e6 * host_seconds,
    }


def measure_model(
    reporter: Reporter, stepping: Stepping, shape: Shape, load: Load, known: dict[str, Any]
) -> None:
    say = reporter.say
    flops = known.get("matmul", {}).get("flops", float("nan"))
    say("start_s", lambda: dict(stepping.seconds))
    profile = stepping.profile
    say(
        "memory", lambda: {"num_blocks": stepping.num_blocks} | (asdict(profile) if profile else {})
    )

    def sampled(batch: int, context: int) -> dict[str, float]:
        greedy, _ = stepping.decode(batch, context, load.steps)
        seconds, _ = stepping.decode(batch, context, load.steps, is_sampled=True)
        return {"step_ms": 1e3 * seconds, "over_greedy": seconds / greedy}

    def mixed(batch: int, num_prompt_tokens: int, context: int) -> dict[str, float]:
        seconds = stepping.mixed(batch, context, num_prompt_tokens, load.steps)
        decode, _ = stepping.decode(batch, context, load.steps)
        prefill = stepping.prefill(num_prompt_tokens, 10)
        return {
            "step_ms": 1e3 * seconds,
            "of_parts": seconds / (decode + prefill),
            "over_decode": seconds / decode,
        }

    def prefill() -> dict[str, float]:
        seconds = stepping.prefill(load.prompt, 3)
        return {
            "step_ms": 1e3 * seconds,
            "tokens_per_s": load.prompt / seconds,
            "of_matmul": shape.prefill_flops(load.prompt) / seconds / flops,
        }

    for batch, context in load.decodes:
        decode = partial(measure_decode, stepping, shape, load, known, batch, context)
        say(f"decode {batch} x {context}", decode)
    batch, context = load.decodes[1]
    say(f"sampled {batch} x {context}", partial(sampled, batch, context))
    decoding, prompt = load.mixed
    say(f"mixed {decoding} + {prompt}", partial(mixed, decoding, prompt, context))
    say(f"prefill {load.prompt}", prefill)
    context = load.decodes[-1][1] // 2
    trace = partial(stepping.trace, load.idle_batch, context, load.steps)
    say(f"trace at {load.idle_batch}", trace)
    say("trace at 1", partial(stepping.trace, 1, load.decodes[0][1], load.steps))
    say("waits in two steps", partial(stepping.waits, load.idle_batch, context))


def measure_again(
    stepping: Stepping, shape: Shape, load: Load, known: dict[str, Any], first: dict[str, Any]
) -> dict[str, float]:
    """Repeat the first measurement; `first` has the figures of the model."""
    batch, context = load.decodes[0]
    found = measure_decode(stepping, shape, load, known, batch, context)
    before = first.get(f"decode {batch} x {context}", {}).get("step_ms", float("nan"))
    return found | {"drift": abs(found["step_ms"] / before - 1)}


def seconds_to_serve(path: Path, device: Device, *options: str) -> dict[str, float]:
    """Measure the time from the command to the first generated token."""
    begin = time.perf_counter()
    arguments = [str(path), "--device", device.value, *options]
    with Server(*arguments, "--cpu-backend", "torch", "--max-num-seqs", "64"):
        return {"s": time.perf_counter() - begin}


LOADS = ((64, 1024, 128), (256, 1024, 128))
"""Loads of a server: clients, prompt tokens and generated tokens."""

TINY_LOADS = ((2, 8, 4),)


def measure_load(
    url: str, vocab_size: int, clients: int, prompt: int, output: int
) -> dict[str, Any]:
    command = ["bench", "serve", "--url", url, "--json"]
    command += ["--max-concurrency", str(clients), "--num-prompts", str(2 * clients)]
    command += ["--random-input-len", str(prompt), "--random-output-len", str(output)]
    command += ["--random-vocab-size", str(vocab_size)]
    said = subprocess.run([*COMMAND, *command], stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(said.stdout)
    if num_failed := found.pop("failed"):
        raise RuntimeError(f"{num_failed} of {2 * clients} requests failed")
    return {key: value for key, value in found.items() if isinstance(value, (int, float))}


def measure_serving(
    reporter: Reporter,
    shape: Shape,
    device: Device,
    directory: Path,
    loads: tuple[tuple[int, int, int], ...],
) -> None:
    path = shape.write(directory, 4096)
    # This start also compiles the kernels, so it is reported separately.
    without_weights = partial(seconds_to_serve, path, device, "--load-format", "dummy")
    reporter.say("first start, without weights", without_weights)

    def start() -> dict[str, float]:
        needed = 2 * (shape.num_layers * shape.layer_weights + 2 * shape.head_weights)
        if shutil.disk_usage(directory).free < 1.2 * needed:
            raise Skipped(
                f"{directory} does not have enough space for {needed / GIB:.0f} GiB of weights"
            )
        begin = time.perf_counter()
        num_bytes = write_weights(shape, directory)
        # The weights have just been written, so they are in the page cache.
        written = {"written_bytes": num_bytes, "written_s": time.perf_counter() - begin}
        return {**seconds_to_serve(path, device), **written}

    reporter.say("start", start)
    options = [str(path), "--device", device.value, "--cpu-backend", "torch"]
    with Server(*options, "--load-format", "dummy") as server:
        for clients, prompt, output in loads:
            load = partial(measure_load, server.url, shape.vocab_size, clients, prompt, output)
            reporter.say(f"{clients} clients, {prompt} + {output} tokens", load)


PARTS = (
    "limits",
    "agreement",
    "repeats",
    "tests",
    "sanitizer",
    "families",
    "requests",
    "model",
    "again",
    "served",
    "profiles",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("shape", nargs="?")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument(
        "--seconds", type=float, default=600, help="time limit of this part, in seconds"
    )
    parser.add_argument(
        "--known", type=json.loads, default={}, help="results of earlier parts, as JSON"
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--ways", nargs="+", metavar="WAY", help="agreement cases, or families, to run"
    )
    add_done(parser)
    arguments = parser.parse_args()
    part = arguments.part
    reporter = Reporter(arguments.done, share_state=part in ("agreement", "model"))
    device = Device(arguments.device)
    load, shapes = (TINY, TINY_SHAPES) if arguments.tiny else (Load(), SHAPES)
    known = arguments.known.get(LIMITS, {})
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name, "model")
        if part == "limits":
            measure_limits(reporter, load, torch.device(arguments.device))
        elif part == "agreement":
            measure_agreement(reporter, arguments, directory)
        elif part == "repeats":
            measure_repeats(reporter, arguments, directory)
        elif part == "tests":
            programs.run_tests(reporter, arguments.seconds, is_tiny=arguments.tiny)
        elif part == "families":
            measure_families(arguments)
        elif part == "requests":
            programs.run_requests(
                reporter, arguments.seconds, arguments.device, is_tiny=arguments.tiny
            )
        elif part == "sanitizer":
            programs.run_sanitizer(reporter, arguments.device)
        elif part == "profiles":
            programs.run_profiles(reporter)
        elif part == "served":
            loads = TINY_LOADS if arguments.tiny else LOADS
            measure_serving(reporter, shapes[arguments.shape], device, directory, loads)
        else:
            shape = shapes[arguments.shape]
            stepping = open_stepping(shape, load, device, directory)
            if part == "model":
                measure_model(reporter, stepping, shape, load, known)
            else:
                first = arguments.known.get(arguments.shape, {})
                name = f"{arguments.shape}, first case"
                again = partial(measure_again, stepping, shape, load, known, first)
                reporter.say(name, again)


if __name__ == "__main__":
    main()
