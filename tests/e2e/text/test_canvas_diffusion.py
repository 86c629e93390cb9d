"""Block diffusion on canvases: tokens equal those of transformers' loop, whatever happens to their requests."""

from __future__ import annotations

import concurrent.futures
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.own_code.canvas_diffusion import CanvasModel, diffusion_gemma
from support.servers.server import Server, assert_nothing_is_held

FLAGS = (
    *("--dtype", "float32", "--served-model-name", "tiny", "--max-num-seqs", "6"),
    *("--chat-template", "{% for message in messages %}{{ message.content }}{% endfor %}"),
)


def ask(server: Server, prompt: list[int], count: int, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    status, answer = server.post("/v1/completions", body | {"return_token_ids": True} | fields)
    assert status == 200, answer
    choice: dict[str, Any] = answer["choices"][0]
    return choice


def prompts_of(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(4, 350) for _ in range(60)]
    return [
        shared[: rng.randrange(60)] + [rng.randrange(4, 350) for _ in range(rng.randrange(1, 30))]
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("bound", "flags"),
    [
        (1.0, ("--max-num-batched-tokens", "24")),
        (1e3, ("--max-num-batched-tokens", "64", "--kv-host-gib", "0.01")),
        (1e3, ("--tensor-parallel-size", "2", "--max-model-len", "120")),
    ],
    ids=["small chunks", "offload", "tensor parallel"],
)
def test_tokens_of_preempted_requests_equal_those_of_the_published_loop(
    tmp_path: Path, bound: float, flags: tuple[str, ...]
) -> None:
    model = diffusion_gemma(tmp_path)
    prompts = prompts_of(3, 6)
    settings = json.dumps({"sampler_config": {"entropy_bound": bound}})
    given = (*flags, "--dllm-algorithm-config", settings, "--inject-preemption", "0.1")
    with Server(str(tmp_path), *FLAGS, *given) as server:
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            pending = [
                pool.submit(ask, server, prompt, 14, seed=seed)
                for seed, prompt in enumerate(prompts)
            ]
            answers = [future.result()["token_ids"] for future in pending]
        assert server.metric("engine:num_preemptions_total") > 0
        assert server.metric("engine:prefix_cache_hits_total") > 0
        assert_nothing_is_held(server)
    found = [
        model.generate(prompt, 14, seed, entropy_bound=bound) for seed, prompt in enumerate(prompts)
    ]
    assert answers == [each.token_ids for each in found]
    # Some canvases are complete before the last pass.
    assert (len({number for each in found for number in each.passes}) > 1) == (bound > 1)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, CanvasModel]]:
    path = tmp_path_factory.mktemp("tiny")
    model = diffusion_gemma(path)
    with Server(str(path), *FLAGS, "--max-model-len", "96") as server:
        yield server, model


def test_an_answer_may_end_within_a_canvas(served: tuple[Server, CanvasModel]) -> None:
    server, model = served
    prompt = prompts_of(4, 1)[0]
    whole = model.generate(prompt, 12, 7)
    found = ask(server, prompt, 7, seed=7, logprobs=2)
    assert found["token_ids"] == whole.token_ids[:7] and found["finish_reason"] == "length"
    assert found["logprobs"]["token_logprobs"] == pytest.approx(whole.logprobs[:7], abs=1e-4)
    stop = whole.token_ids[5]
    stopped = ask(server, prompt, 12, seed=7, stop_token_ids=[stop])["token_ids"]
    assert stopped == whole.token_ids[: whole.token_ids.index(stop) + 1]


def test_a_canvas_may_exceed_the_maximum_length(served: tuple[Server, CanvasModel]) -> None:
    server, model = served
    prompt = [*range(10, 99)]
    found = ask(server, prompt, 7, seed=1)["token_ids"]
    assert found == model.generate(prompt, 7, 1).token_ids


def test_a_sampled_answer_depends_on_its_seed_alone(served: tuple[Server, CanvasModel]) -> None:
    server, _ = served
    prompts = prompts_of(6, 6)
    sampling = {"temperature": 1, "top_p": 0.9}
    alone = [ask(server, p, 9, seed=i, **sampling)["token_ids"] for i, p in enumerate(prompts)]
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        pending = [
            pool.submit(ask, server, p, 9, seed=i, **sampling) for i, p in enumerate(prompts)
        ]
        assert [future.result()["token_ids"] for future in pending] == alone
    assert alone[0] != ask(server, prompts[0], 9, seed=99, **sampling)["token_ids"]
    assert set(ask(server, prompts[0], 9, allowed_token_ids=[7, 9])["token_ids"]) <= {7, 9}


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--dllm-algorithm", "LowConfidence"), "does not fit the model; use Gemma4Renoise"),
        (("--dllm-algorithm-config", '{"t_max": 0.1}'), "t_max 0.1 must be at least t_min"),
    ],
    ids=["algorithm", "temperatures"],
)
def test_settings_that_do_not_fit_are_refused(
    tmp_path: Path, flags: tuple[str, ...], problem: str
) -> None:
    diffusion_gemma(tmp_path)
    with Server(str(tmp_path), *FLAGS, *flags, wait=False) as server:
        server.wait_for(problem)
