"""Measure how much of a conversation each turn finds cached, with states in blocks of several sizes.

    scripts/bench/run state_checkpoints --model PATH [--block-sizes 256,512,1024]

The model must have recurrent layers: then a prefix can be reused only up to a token whose state is cached.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

from engine import LLM, SamplingParams


def measure(model: str, block_size: int, turns: int, question: int, answer: int) -> dict[str, Any]:
    """Return a conversation's prompt tokens, its cached tokens, and the median delay of the first token of a turn."""
    rng = random.Random(1)
    engine = LLM(
        model,
        block_size=block_size,
        max_model_len=turns * (2 * question + answer) + block_size,
        max_num_seqs=8,
    )
    history: list[int] = []
    prompts, cached, seconds = [], [], []
    with engine:
        for _ in range(turns):
            history += [rng.randrange(4, 300) for _ in range(rng.randrange(1, 2 * question))]
            start = time.perf_counter()
            (output,) = engine.generate(
                history, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
            )
            seconds.append(time.perf_counter() - start)
            prompts.append(len(history))
            cached.append(output.num_cached_tokens or 0)
            (output,) = engine.generate(
                history, SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
            )
            history += output.outputs[0].token_ids
    recomputed = [a - b for a, b in zip(prompts[1:], cached[1:], strict=True)]
    return {
        "block_size": block_size,
        "prompt_tokens": sum(prompts),
        "cached_tokens": sum(cached),
        "computed_per_turn": round(statistics.mean(recomputed)),
        "median_s": round(statistics.median(seconds[1:]), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--block-sizes", default="256,512,1024,2048")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument(
        "--question", type=int, default=150, help="mean number of tokens in a question"
    )
    parser.add_argument("--answer", type=int, default=300, help="number of tokens in an answer")
    args = parser.parse_args()
    for block_size in map(int, args.block_sizes.split(",")):
        result = measure(args.model, block_size, args.turns, args.question, args.answer)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
