"""Measure the cost of penalties, biases, log-probabilities and grammars, compared with plain requests.

    scripts/bench/run sampling_features [--model PATH] [-c 1 8] [--rounds 3] [--tokens 128] [-- serve arguments]

One server gets the same prompts first without any of these options, and then with each of them. Requests are greedy and
drafts are off, so that every answer takes the same number of steps. Prints output tokens per second, and the ratio to
plain requests in the same round.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from typing import Any, Final

import uvloop
from drafts import MODEL, NO_DRAFTS, answer_all, prose
from support.server import Server

SAMPLING_FEATURES: Final[dict[str, dict[str, Any]]] = {
    "none": {},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "logit_bias": {"logit_bias": {"5": 1.0, "7": -1.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(40_000))},
    "bad_words": {"bad_words": ["the end", "of course"]},
    "logprobs": {"logprobs": 5},
    "temperature, top_p": {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    "regex": {"structured_outputs": {"regex": r"[a-zA-Z0-9 .,;:'\n]*"}},
}


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
            for number in range(given.rounds):
                for name, feature in SAMPLING_FEATURES.items():
                    rng = random.Random(number)
                    common = {"model": MODEL, "max_tokens": given.tokens, "ignore_eos": True}
                    requests = [
                        {**common, "temperature": 0, **prose(rng), **feature}
                        for _ in range(max(4, 2 * concurrency))
                    ]
                    rate, _ = uvloop.run(answer_all(server.url, requests, concurrency))
                    rates[name].append(rate)
            for name, measured in rates.items():
                ratios = [a / b for a, b in zip(measured, rates["none"], strict=True)]
                result = {
                    "feature": name,
                    "concurrency": concurrency,
                    "output_tok_s": round(statistics.median(measured), 1),
                    "ratios": [round(ratio, 2) for ratio in ratios],
                }
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
