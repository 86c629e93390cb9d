"""Put closed-loop load on any OpenAI-compatible server: tokens a second, first-token and inter-token times.

Prompts are token ids, so their length is exact, and each opens with ids of its own, so that no prefix
cache helps unless `--shared-prefix` asks for one. Greedy, `ignore_eos`, streaming, with usage.

    scripts/bench/run load --url http://127.0.0.1:8000 --model NAME -c 8 -n 32

Needs the `bench` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import numpy as np
import uvloop

FIRST_ORDINARY_ID = 1000
"""Ids from here up are ordinary words in every vocabulary that is served."""


class Choice(msgspec.Struct):
    text: str | None = None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class Event(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


decode_event = msgspec.json.Decoder(Event).decode


@dataclass
class Answer:
    start: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    def take(self, event: Event) -> None:
        if event.error is not None:
            self.error = str(event.error)
        if event.choices and event.choices[0].text:
            self.chunk_times.append(time.perf_counter())
        if (usage := event.usage) is not None:
            self.output_tokens = usage.completion_tokens
            self.prompt_tokens = usage.prompt_tokens
            details = usage.prompt_tokens_details
            self.cached_tokens = (details and details.cached_tokens) or 0


def make_prompts(count: int, own: int, shared: int, vocabulary: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)

    def ids(n: int) -> list[int]:
        return [rng.randrange(FIRST_ORDINARY_ID, vocabulary) for _ in range(n)]

    head = ids(shared)
    return [head + ids(own) for _ in range(count)]


async def ask(
    session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], max_tokens: int
) -> Answer:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer(start=time.perf_counter())
    try:
        async with session.post(url + "/v1/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                return answer
            rest = b""
            async for data in response.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: {"):
                        answer.take(decode_event(line[6:]))
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
        answer.error = repr(error)
    if answer.error is None and not answer.chunk_times:
        answer.error = "no text came"
    return answer


async def measure(
    url: str,
    model: str,
    *,
    concurrency: int,
    requests: int,
    prompt_tokens: int,
    max_tokens: int,
    shared_prefix: int = 0,
    vocabulary: int = 49152,
    seed: int = 1,
) -> dict[str, Any]:
    """One point. Times in milliseconds, rates in tokens a second."""
    todo = iter(make_prompts(requests, prompt_tokens, shared_prefix, vocabulary, seed))
    answers: list[Answer] = []
    timeout = aiohttp.ClientTimeout(total=1800)
    # A connection for each request: llama-server closes one after a streamed answer without saying so.
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=timeout,
        read_bufsize=1 << 20,
    ) as session:

        async def client() -> None:
            for prompt in todo:
                answer = await ask(session, url, model, prompt, max_tokens)
                answers.append(answer)

        begin = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(concurrency)))
        wall = time.perf_counter() - begin
    good = [a for a in answers if a.error is None]
    first = [a.chunk_times[0] - a.start for a in good]
    gaps = [b - a for x in good for a, b in zip(x.chunk_times, x.chunk_times[1:], strict=False)]
    output = sum(a.output_tokens for a in good)
    total = output + sum(a.prompt_tokens for a in good)
    return {
        "concurrency": concurrency,
        "requests": requests,
        "wall_s": round(wall, 3),
        "failed": len(answers) - len(good),
        "first_error": next((a.error for a in answers if a.error), None),
        "output_tok_s": round(output / wall, 1),
        "total_tok_s": round(total / wall, 1),
        "ttft_ms_p50": _percentile_ms(first, 0.5),
        "ttft_ms_p99": _percentile_ms(first, 0.99),
        "itl_ms_p50": _percentile_ms(gaps, 0.5),
        "itl_ms_p99": _percentile_ms(gaps, 0.99),
        "cached_tokens": round(statistics.fmean(a.cached_tokens for a in good), 1) if good else 0,
    }


def _percentile_ms(values: list[float], fraction: float) -> float | None:
    if not values:
        return None
    return round(float(np.quantile(values, fraction)) * 1e3, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("-c", "--concurrency", type=int, default=8)
    parser.add_argument("-n", "--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--shared-prefix", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--seed", type=int, default=1)
    options = vars(parser.parse_args())
    # The client has the server's processors: what it takes is not there for any contender.
    result = uvloop.run(measure(options.pop("url"), options.pop("model"), **options))
    print(json.dumps(result))
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
