"""Diffusion over whole answers: tokens equal those of the published loop, whatever happens to their requests."""

from __future__ import annotations

import concurrent.futures
import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.own_code.answer_diffusion import MAKERS
from support.own_code.block_diffusion import sdar
from support.servers.server import Server, assert_nothing_is_held

FLAGS = (
    *("--dtype", "float32", "--served-model-name", "tiny", "--max-num-seqs", "6"),
    *("--max-model-len", "160"),
    *("--chat-template", "{% for message in messages %}{{ message.content }}{% endfor %}"),
)


def ask(server: Server, prompt: list[int], count: int, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    status, answer = server.post("/v1/completions", body | {"return_token_ids": True} | fields)
    assert status == 200, answer
    return dict(answer["choices"][0])


def prompts_of(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 350) for _ in range(rng.randrange(1, 60))] for _ in range(count)]


@pytest.mark.parametrize(
    ("kind", "block_size", "answer_size", "threshold", "count", "flags"),
    [
        ("llada", 8, 24, 1.0, 3, ("--max-num-batched-tokens", "184")),
        ("llada", 8, 16, 0.1, 1, ("--cpu-backend", "torch")),
        ("llada moe", 4, 12, 0.1, 1, ()),
        ("dream", 16, 16, 0.1, 1, ("--tensor-parallel-size", "2")),
        ("rnd1", 4, 20, 0.1, 2, ()),
    ],
)
def test_tokens_of_preempted_requests_equal_those_of_the_published_loop(
    tmp_path: Path,
    kind: str,
    block_size: int,
    answer_size: int,
    threshold: float,
    count: int,
    flags: tuple[str, ...],
) -> None:
    model, prompts = MAKERS[kind](tmp_path), prompts_of(5, 6)
    settings = {"threshold": threshold, "block_size": block_size, "answer_size": answer_size}
    settings["tokens_per_pass"] = count
    given = (*flags, "--dllm-algorithm-config", json.dumps(settings))
    with Server(str(tmp_path), *FLAGS, *given, "--inject-preemption", "0.05") as server:
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: ask(server, prompt, 37), prompts))
        assert server.metric("engine:num_preemptions_total") > 0
        assert_nothing_is_held(server)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = model.generate(prompt, 37, threshold, block_size, answer_size, count)
        assert answer["token_ids"] == expected


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            ("--dllm-algorithm-config", '{"block_size": 32, "answer_size": 48}'),
            "answer_size 48 must be a multiple of block_size, which is 32",
        ),
        (("--max-num-batched-tokens", "200"), "--max-num-batched-tokens 200 must be at least 288"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, flags: tuple[str, ...], problem: str
) -> None:
    MAKERS["llada"](tmp_path)
    with Server(str(tmp_path), *FLAGS, *flags, wait=False) as server:
        server.wait_for(problem)


def test_an_answer_size_is_refused_if_tokens_do_not_attend_to_later_blocks(tmp_path: Path) -> None:
    sdar(tmp_path, 8)
    given = ("--dllm-algorithm-config", '{"answer_size": 16}')
    with Server(str(tmp_path), *FLAGS, *given, wait=False) as server:
        server.wait_for("answer_size 16 does not apply to tiny")


def test_an_answer_ends_with_the_block_of_its_stop_token(
    tmp_path: Path,
) -> None:
    model, prompt = MAKERS["dream"](tmp_path), prompts_of(7, 1)[0]
    whole = model.generate(prompt, 32, 0.95, 32, 128)
    stop = whole[9]
    with Server(str(tmp_path), *FLAGS) as server:
        answer = ask(server, prompt, 100, stop_token_ids=[stop])
        assert server.metric("engine:prefix_cache_hits_total") == 0
    assert answer["finish_reason"] == "stop"
    assert answer["token_ids"] == whole[: whole.index(stop) + 1]
