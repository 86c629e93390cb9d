"""Measure the cost of LoRA adapters: tokens per second of batches with and without them, in alternation.

    scripts/bench/run lora [--model PATH] [--adapters 8] [--rank 16] [--rounds 5]

The adapters are random, and change all projections of the layers. A second part streams from the base model while
adapters are loaded one after the other, and compares the times between its tokens with a stream without loads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from engine import LLM, SamplingParams
from engine.frontend.cli.bench.client import Endpoint, run_sessions
from engine.frontend.cli.bench.datasets import Session, Turn
from engine.workers.loaders.open_checkpoint import open_checkpoint
from safetensors.torch import save_file
from side_by_side.rounds import alternate
from support.servers.server import Server, default_model


def write_adapter(directory: Path, shapes: dict[str, tuple[int, ...]], rank: int) -> None:
    """Write a random adapter for modules with these shapes."""
    directory.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for module, (rows, columns) in shapes.items():
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns, dtype=torch.bfloat16) * 0.02
        tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank, dtype=torch.bfloat16) * 0.02
    save_file(tensors, directory / "adapter_model.safetensors")


def tokens_per_second(llm: LLM, names: list[str | None], length: int, count: int) -> float:
    """Return the tokens per second of one batch, whose requests use these adapters."""
    prompts = [[random.randrange(4, 300) for _ in range(length)] for _ in names]
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, lora_request=names)
    return len(names) * (length if count == 1 else count) / (time.perf_counter() - start)


def token_gaps(server: Server, count: int) -> list[float]:
    """Return the seconds between the tokens of a stream of the base model."""
    endpoint = Endpoint(server.url, "base", fields={"temperature": 0, "ignore_eos": True})
    session = Session([Turn([5] * 16, count)])
    [answer], _ = asyncio.run(run_sessions(endpoint, [session]))
    return [after - before for before, after in pairwise(answer.chunk_times)]


def measure_loads(model: str, directory: Path, names: list[str], rank: int) -> None:
    """Print the times between tokens of two streams, of which the second one runs while adapters are loaded."""
    flags = (
        *("--enable-lora", "--allow-runtime-lora-updating", "--max-lora-rank", str(rank)),
        *("--max-cpu-loras", "2", "--served-model-name", "base"),
    )
    with Server(model, *flags) as server:
        token_gaps(server, 64)
        for kind in ("alone", "during loads"):
            is_over = threading.Event()
            num_loads = 0

            def load_all(is_over: threading.Event = is_over) -> None:
                nonlocal num_loads
                while not is_over.is_set():
                    name = names[num_loads % len(names)]
                    load = {"lora_name": name, "lora_path": str(directory / name)}
                    status, answer = server.post("/v1/load_lora_adapter", load)
                    assert status == 200, answer
                    server.post("/v1/unload_lora_adapter", {"lora_name": name})
                    num_loads += 1

            thread = threading.Thread(target=load_all)
            if kind != "alone":
                thread.start()
            gaps = sorted(token_gaps(server, 1024))
            is_over.set()
            if kind != "alone":
                thread.join()
            median, most = statistics.median(gaps), gaps[-1]
            p99 = gaps[len(gaps) * 99 // 100]
            print(
                f"{kind:13} {num_loads:3} loads  between tokens: median {median * 1e3:.1f} ms, "
                f"99 % {p99 * 1e3:.1f} ms, longest {most * 1e3:.1f} ms"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = open_checkpoint(Path(args.model))
        shapes = {
            name.removesuffix(".weight"): tuple(checkpoint.shape(name))
            for name in checkpoint.names()
            if name.endswith("_proj.weight")
        }
        names: list[str | None] = [f"adapter-{i}" for i in range(args.adapters)]
        for name in names:
            write_adapter(Path(directory, str(name)), shapes, args.rank)
        modules = [f"{name}={directory}/{name}" for name in names]
        kinds: dict[str, list[str | None]] = {
            "base": [None] * args.batch,
            "one adapter": [names[0]] * args.batch,
            f"{args.adapters} adapters": [names[i % len(names)] for i in range(args.batch)],
        }
        settings = {"max_loras": args.adapters, "max_lora_rank": args.rank}
        with LLM(args.model, enable_lora=True, lora_modules=modules, **settings) as llm:
            for phase, length, count in (("decode", 16, 128), ("prefill", 512, 1)):
                runs = {
                    kind: partial(tokens_per_second, llm, adapters, length, count)
                    for kind, adapters in kinds.items()
                }
                paces = alternate(runs, args.rounds)
                base = statistics.median(paces["base"])
                for kind, each in paces.items():
                    median = statistics.median(each)
                    print(
                        f"{phase:8} {kind:12} {median:8.0f} tokens/s  {median / base:.3f} of the base"
                    )
        measure_loads(args.model, Path(directory), [str(name) for name in names], args.rank)


if __name__ == "__main__":
    main()
