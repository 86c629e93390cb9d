"""Measure what LoRA adapters cost: tokens per second of batches with and without them, in alternation.

    scripts/bench/run lora [--model PATH] [--adapters 8] [--rank 16] [--rounds 5]

The adapters are random, and change all projections of the layers.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from engine import LLM, SamplingParams
from engine.workers.loaders.open_checkpoint import open_checkpoint
from safetensors.torch import save_file
from side_by_side.contenders import default_model


def write_adapter(directory: Path, shapes: dict[str, tuple[int, ...]], rank: int) -> None:
    """Write a random adapter of the modules with these shapes."""
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
    """Return the pace of one batch with these adapters."""
    prompts = [[random.randrange(4, 300) for _ in range(length)] for _ in names]
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, lora_request=names)
    return len(names) * (length if count == 1 else count) / (time.perf_counter() - start)


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
                paces: dict[str, list[float]] = {kind: [] for kind in kinds}
                for round_ in range(args.rounds + 1):
                    for kind, adapters in kinds.items():
                        pace = tokens_per_second(llm, adapters, length, count)
                        if round_:
                            paces[kind].append(pace)
                base = statistics.median(paces["base"])
                for kind, each in paces.items():
                    median = statistics.median(each)
                    print(
                        f"{phase:8} {kind:12} {median:8.0f} tokens/s  {median / base:.3f} of the base"
                    )


if __name__ == "__main__":
    main()
