"""Measure the cost of penalties, biases, log-probabilities and grammars, compared with plain requests.

    scripts/bench/run sampling_features [--model PATH] [-c 1 8] [--rounds 3] [--tokens 128] [-- serve arguments]

One server gets the same prompts first without any of these options, and then with each of them. Requests are greedy
unless the option is about sampling, and drafts are off, so that every answer takes the same number of steps. Prints
output tokens per second and their ratio to plain requests in the same round, and for busy machines the same ratio of
tokens per second of CPU time of all processes, and the CPU time that a process adds to each token.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from typing import Any, Final

import uvloop
from drafts import MODEL, NO_DRAFTS, answer_all, prose
from support.servers.server import Server, title_of
from token_cost import cpu_ns

SAMPLING_FEATURES: Final[dict[str, dict[str, Any]]] = {
    "none": {},
    "temperature": {"temperature": 0.8, "seed": 1},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "presence, frequency": {"presence_penalty": 0.3, "frequency_penalty": 0.3},
    "logit_bias": {"logit_bias": {"5": 1.0, "7": -1.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(40_000))},
    "bad_words": {"bad_words": ["the end", "of course"]},
    "logprobs": {"logprobs": 5},
    "temperature, top_p": {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    "json_schema": {
        "structured_outputs": {
            "json": {"type": "array", "items": {"type": "integer"}, "minItems": 1000}
        }
    },
    "regex": {"structured_outputs": {"regex": r"[a-zA-Z0-9 .,;:'\n]*"}},
}


def cpu_us(server: Server) -> dict[str, float]:
    """Return the CPU time that each process has used, in microseconds."""
    return {title_of(child): cpu_ns(child.pid) / 1e3 for child in server.children}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="model to measure (default: the default model)")
    parser.add_argument("-c", "--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("serve", nargs="*", help="additional arguments for `engine serve`")
    given = parser.parse_args()
    model = [given.model] if given.model else []
    named = [*model, "--served-model-name", MODEL, "--no-enable-prefix-caching", *NO_DRAFTS]
    with Server(*named, *given.serve) as server:
        for concurrency in given.concurrency:
            rates: dict[str, list[float]] = {name: [] for name in SAMPLING_FEATURES}
            costs: dict[str, list[dict[str, float]]] = {name: [] for name in SAMPLING_FEATURES}
            for number in range(given.rounds):
                for name, feature in SAMPLING_FEATURES.items():
                    rng = random.Random(number)
                    common = {"model": MODEL, "max_tokens": given.tokens, "ignore_eos": True}
                    requests = [
                        {**common, "temperature": 0, **prose(rng), **feature}
                        for _ in range(max(4, 2 * concurrency))
                    ]
                    before = cpu_us(server)
                    rate, _ = uvloop.run(answer_all(server.url, requests, concurrency))
                    num_tokens = len(requests) * given.tokens
                    rates[name].append(rate)
                    costs[name].append(
                        {k: (us - before[k]) / num_tokens for k, us in cpu_us(server).items()}
                    )
            for name, measured in rates.items():
                ratios = [a / b for a, b in zip(measured, rates["none"], strict=True)]
                pairs = list(zip(costs[name], costs["none"], strict=True))
                added = {
                    process: statistics.median(
                        cost[process] - plain[process] for cost, plain in pairs
                    )
                    for process in costs[name][0]
                }
                result = {
                    "feature": name,
                    "concurrency": concurrency,
                    "output_tok_s": round(statistics.median(measured), 1),
                    "ratios": [round(ratio, 2) for ratio in ratios],
                    "cpu_ratios": [
                        round(sum(plain.values()) / sum(cost.values()), 2) for cost, plain in pairs
                    ],
                    "added_us": {k: round(us, 1) for k, us in added.items() if abs(us) >= 0.1},
                }
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
