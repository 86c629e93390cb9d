"""Measure the speed with drafts for several kinds of text, compared with a server without them.

    scripts/bench/run drafts [--model PATH] [--kinds KIND ...] [-c 1 4 16] [--rounds 3] [--tokens 128]
                             [--speculative-config JSON] [-- serve arguments]

`prose` continues passages of Python's language manual. `questions` are chat messages, and `edits` ask for such a
passage with one change. `code` gives lines of the standard library, then the first of them again with a variable
renamed; the model continues these, like an edit by a coding agent. `random` continues random tokens at temperature 1.5.

Both servers get the same requests alternately, with `ignore_eos`. Half of the answers are greedy, half are sampled at
temperature 0.7, each with its own seed; the answers of `code` are all greedy. Both servers must give the same answers.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pydoc_data import topics
from typing import Any, Final

import aiohttp
import uvloop
from support.servers.server import Server

MODEL: Final = "drafts"
NO_DRAFTS: Final = ["--speculative-config", '{"num_speculative_tokens": 0}']
MANUAL: Final = re.sub(
    r"\s+", " ", "\n".join(topics.topics[name] for name in sorted(topics.topics))
)
SUBJECTS: Final = (
    *("the tides", "bread", "glaciers", "violins", "vaccines", "bridges", "honey bees", "paper"),
    *("comets", "chess", "the compass", "silk", "volcanoes", "maps", "coffee", "lighthouses"),
)

MODULES: Final = ("argparse", "configparser", "textwrap", "zipfile", "mailbox", "csv", "shlex")

Body = dict[str, Any]


def passage(rng: random.Random, num_characters: int) -> str:
    start = MANUAL.find(". ", rng.randrange(len(MANUAL) - 2 * num_characters)) + 2
    return MANUAL[start : start + num_characters]


def prose(rng: random.Random) -> Body:
    return {"prompt": passage(rng, 540)}


def question(rng: random.Random) -> Body:
    return _chat(
        f"What should everybody know about {rng.choice(SUBJECTS)}, and why? Give examples."
    )


def edit(rng: random.Random) -> Body:
    return _chat(
        f"Write this text once more, but in capitals where a verb is:\n\n{passage(rng, 400)}"
    )


def code(rng: random.Random) -> Body:
    """Return a prompt with 60 lines of a module, and the first 12 of them again with a variable renamed."""
    lines = inspect.getsource(import_module(rng.choice(MODULES))).splitlines()
    start = rng.randrange(len(lines) // 4, len(lines) // 2)
    old = "\n".join(lines[start : start + 60])
    names = re.findall(r"\b[a-z]{4,}\b", old)
    name = max(sorted(set(names)), key=names.count)
    new = re.sub(rf"\b{name}\b", f"{name}_value", old).splitlines()
    begun = "\n".join(new[:12])
    return {
        "prompt": f"```python\n{old}\n```\nThe same code with `{name}` renamed to `{name}_value`:\n```python\n{begun}\n",
        "temperature": 0,
    }


def noise(rng: random.Random) -> Body:
    return {"prompt": [rng.randrange(1000, 40_000) for _ in range(200)], "temperature": 1.5}


def _chat(text: str) -> Body:
    return {"messages": [{"role": "user", "content": text}]}


KINDS: Final[dict[str, Callable[[random.Random], Body]]] = {
    "prose": prose,
    "questions": question,
    "edits": edit,
    "code": code,
    "random": noise,
}


def make_requests(kind: str, count: int, num_tokens: int, seed: int) -> list[Body]:
    rng = random.Random(f"{kind} {seed}")
    common = {"model": MODEL, "max_tokens": num_tokens, "ignore_eos": True}
    return [
        {**common, "temperature": 0.7 * (index % 2), "seed": index, **KINDS[kind](rng)}
        for index in range(count)
    ]


async def answer_all(
    url: str, requests: list[Body], concurrency: int
) -> tuple[float, dict[int, str]]:
    """Send the requests. Return the tokens per second, and the answers."""
    answers: dict[int, str] = {}
    num_tokens = 0
    todo = iter(enumerate(requests))

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal num_tokens
        for index, body in todo:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            async with session.post(url + path, json=body) as response:
                answer = await response.json()
            if response.status != 200:
                raise SystemExit(f"HTTP {response.status}: {answer}")
            choice = answer["choices"][0]
            answers[index] = choice["text"] if "text" in choice else choice["message"]["content"]
            num_tokens += answer["usage"]["completion_tokens"]

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1800)) as session:
        begin = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(concurrency)))
        return num_tokens / (time.perf_counter() - begin), answers


def count_drafts(server: Server) -> tuple[float, float]:
    """Return how many draft tokens a server has verified so far, and how many of them it accepted."""
    names = (f"engine:spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted"))
    drafted, accepted = map(server.metric, names)
    return drafted, accepted


def measure_requests(
    drafting: Server, plain: Server, rounds: list[list[Body]], concurrency: int
) -> dict[str, Any]:
    """Return the speeds of two servers, which get the requests of each round alternately."""
    with_drafts, without, num_different = [], [], 0
    drafted_before, right_before = count_drafts(drafting)
    for requests in rounds:
        rate, answers = uvloop.run(answer_all(drafting.url, requests, concurrency))
        with_drafts.append(rate)
        rate, expected = uvloop.run(answer_all(plain.url, requests, concurrency))
        without.append(rate)
        num_different += sum(answers[index] != text for index, text in expected.items())
    drafted, right = count_drafts(drafting)
    ratios = [a / b for a, b in zip(with_drafts, without, strict=True)]
    return {
        "output_tok_s": round(statistics.median(with_drafts), 1),
        "without": round(statistics.median(without), 1),
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "drafted": int(drafted - drafted_before),
        "right": round((right - right_before) / max(drafted - drafted_before, 1), 3),
        "different_answers": num_different,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="model to measure (default: the default model)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--speculative-config", help="speculative configuration (default: the server's)"
    )
    parser.add_argument("-c", "--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("serve", nargs="*", help="additional arguments for `engine serve`")
    given = parser.parse_args()
    model = [given.model] if given.model else []
    # Switch the prefix cache off, so that neither server profits from earlier requests.
    named = [*model, "--served-model-name", MODEL, "--no-enable-prefix-caching", *given.serve]
    how = ["--speculative-config", given.speculative_config] if given.speculative_config else []
    results = []
    with Server(*named, *how) as drafting, Server(*named, *NO_DRAFTS) as plain:
        for kind in given.kinds:
            for concurrency in given.concurrency:
                requests = [
                    make_requests(kind, max(4, 2 * concurrency), given.tokens, number)
                    for number in range(given.rounds)
                ]
                result = measure_requests(drafting, plain, requests, concurrency)
                result = {"kind": kind, "concurrency": concurrency, **result}
                print(json.dumps(result), flush=True)
                results.append(result)
    return int(any(result["different_answers"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
