"""Block-diffusion models: tokens equal those of the published loop, whatever happens to their requests."""

from __future__ import annotations

import concurrent.futures
import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import openai
import psutil
import pytest
from support.own_code.block_diffusion import MASK, DiffusionModel, llada2, sdar
from support.processes.faults import ENVIRONMENT
from support.servers.server import Server, assert_nothing_is_held

FLAGS = (
    *("--dtype", "float32", "--served-model-name", "tiny", "--max-num-seqs", "6"),
    *("--chat-template", "{% for message in messages %}{{ message.content }}{% endfor %}"),
)
MAKERS = {
    "sdar": sdar,
    "sdar moe": lambda path, size: sdar(path, size, has_experts=True),
    "llada2": llada2,
    "llada2 with shared experts": lambda path, size: llada2(path, size, capacity=4),
}


class Served(NamedTuple):
    server: Server
    model: DiffusionModel
    threshold: float

    def expected(self, prompt: list[int], count: int) -> list[int]:
        return self.model.generate(prompt, count, self.threshold).token_ids

    def complete(self, prompt: list[int], count: int, **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, **fields}
        status, answer = self.server.post("/v1/completions", body)
        assert status == 200, answer
        return answer

    def tokens(self, prompt: list[int], count: int, **fields: Any) -> list[int]:
        found: list[int] = self.complete(prompt, count, **fields)["choices"][0]["token_ids"]
        return found


def serve(
    directory: Path, kind: str, size: int, threshold: float, *flags: str, **env: str
) -> Iterator[Served]:
    model = MAKERS[kind](directory, size)
    settings = directory / "denoising.yaml"
    settings.write_text(f"threshold: {threshold}\n")
    given = ("--dllm-algorithm", "LowConfidence", "--dllm-algorithm-config", str(settings))
    with Server(str(directory), *FLAGS, *given, *flags, env=env) as server:
        yield Served(server, model, threshold)


def prompts_of(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(4, 350) for _ in range(90)]
    return [
        shared[: rng.randrange(90)] + [rng.randrange(4, 350) for _ in range(rng.randrange(1, 50))]
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("kind", "size", "threshold", "flags"),
    [
        ("sdar", 4, 0.3, ("--max-num-batched-tokens", "24")),
        ("sdar", 8, 0.95, ("--cpu-backend", "torch", "--max-num-batched-tokens", "48")),
        ("sdar", 4, 0.5, ("--tensor-parallel-size", "2", "--max-num-batched-tokens", "64")),
        ("sdar moe", 4, 0.3, ("--max-num-batched-tokens", "64", "--kv-host-gib", "0.01")),
        ("llada2", 32, 0.1, ("--max-num-batched-tokens", "64")),
        ("llada2", 16, 0.2, ("--tensor-parallel-size", "2")),
        ("llada2 with shared experts", 8, 0.2, ("--max-num-batched-tokens", "24")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_tokens_of_preempted_requests_equal_those_of_the_published_loop(
    tmp_path: Path, kind: str, size: int, threshold: float, flags: tuple[str, ...]
) -> None:
    prompts = prompts_of(size, 12)
    options = (*flags, "--inject-preemption", "0.05")
    for served in serve(tmp_path, kind, size, threshold, *options):
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(partial(served.tokens, count=37), prompts))
        for prompt, tokens in zip(prompts, answers, strict=True):
            assert tokens == served.expected(prompt, 37)
        server = served.server
        assert server.metric("engine:num_preemptions_total") > 0
        assert server.metric("engine:prefix_cache_hits_total") > 0
        assert_nothing_is_held(server)


@pytest.mark.parametrize(
    ("threshold", "edit", "most_edits", "penalty"),
    [(0.02, 0.0, 16, 0.0), (0.9, 0.0, 1, 0.0), (0.02, 0.0, 4, 3.0)],
)
def test_tokens_are_edited_as_in_the_published_loop(
    tmp_path: Path, threshold: float, edit: float, most_edits: int, penalty: float
) -> None:
    model = sdar(tmp_path, 8)
    settings = {
        "threshold": threshold,
        "edit_threshold": edit,
        "max_post_edit_steps": most_edits,
        "penalty_lambda": penalty,
    }
    given = ("--dllm-algorithm", "JointThreshold", "--dllm-algorithm-config", json.dumps(settings))
    prompts = prompts_of(9, 8)
    with Server(str(tmp_path), *FLAGS, *given, "--inject-preemption", "0.05") as server:
        served = Served(server, model, threshold)
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(partial(served.tokens, count=30), prompts))
    expected = [model.edit(prompt, 30, threshold, edit, most_edits, penalty) for prompt in prompts]
    assert answers == expected
    if penalty:
        assert answers != [model.edit(p, 30, threshold, edit, most_edits) for p in prompts]
    assert answers != [model.generate(prompt, 30, threshold).token_ids for prompt in prompts]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("tiny")
    yield from serve(path, "sdar", 8, 0.3, "--heartbeat-timeout", "3", **ENVIRONMENT)


@pytest.mark.parametrize("count", [1, 3, 8, 21])
def test_max_tokens_may_end_within_a_block(served: Served, count: int) -> None:
    prompt = prompts_of(3, 1)[0]
    answer = served.complete(prompt, count)
    assert answer["choices"][0]["token_ids"] == served.expected(prompt, count)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == count


def test_a_stop_token_within_a_block_ends_the_answer(served: Served) -> None:
    prompt = prompts_of(4, 1)[0]
    whole = served.expected(prompt, 30)
    stop = whole[10]
    answer = served.complete(prompt, 30, stop_token_ids=[stop])["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert answer["token_ids"] == whole[: whole.index(stop) + 1]


def test_log_probabilities_are_those_of_the_pass_that_fixed_a_token(served: Served) -> None:
    prompt = prompts_of(5, 1)[0]
    found = served.complete(prompt, 20, logprobs=2)["choices"][0]["logprobs"]
    expected = served.model.generate(prompt, 20, served.threshold).logprobs
    assert found["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert all(len(alternatives) in (2, 3) for alternatives in found["top_logprobs"])


def test_a_sampled_answer_depends_on_its_seed_alone(served: Served) -> None:
    prompts = prompts_of(6, 8)
    sampling = {"temperature": 0.8, "top_p": 0.9}

    def sample(item: tuple[int, list[int]]) -> list[int]:
        seed, prompt = item
        return served.tokens(prompt, 25, seed=seed, **sampling)

    alone = [sample(item) for item in enumerate(prompts)]
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(sample, enumerate(prompts)))
    assert together == alone
    assert alone[0] != served.tokens(prompts[0], 25, seed=99, **sampling)
    assert not any(MASK in tokens for tokens in alone)


def test_changes_of_logits_apply_at_every_position(served: Served) -> None:
    prompt = prompts_of(7, 1)[0]
    assert set(served.tokens(prompt, 20, allowed_token_ids=[7, 9])) <= {7, 9}
    assert served.tokens(prompt, 20, logit_bias={"11": 100}) == [11] * 20
    eos = served.tokens(prompt, 20, logit_bias={"1": 100}, ignore_eos=False)
    assert eos == [1]
    later = served.tokens(prompt, 20, logit_bias={"1": 100}, ignore_eos=False, min_tokens=5)
    assert len(later) == 6 and later[-1] == 1 and 1 not in later[:-1]


def test_the_openai_client_streams_blocks_and_stops_at_a_text(served: Served) -> None:
    client = openai.OpenAI(base_url=served.server.url + "/v1", api_key="none")
    question: Any = [{"role": "user", "content": "the quick brown fox jumps over"}]
    settings: Any = {"model": "tiny", "messages": question, "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**settings, extra_body={"ignore_eos": True})
    text = whole.choices[0].message.content or ""
    stream = client.chat.completions.create(
        **settings, stream=True, extra_body={"ignore_eos": True}
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == text
    stop = text[len(text) // 2 :][:3]
    cut = client.chat.completions.create(**settings, stop=stop, extra_body={"ignore_eos": True})
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("title", ["worker 0", "core 0"])
def test_streams_survive_a_crash_with_equal_tokens(served: Served, title: str) -> None:
    prompts = prompts_of(8, 6)
    victim: psutil.Process = served.server.child(title)
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        pending = [pool.submit(served.tokens, prompt, 400) for prompt in prompts]
        while served.server.metric("engine:generation_tokens_total") == 0:
            pass
        victim.kill()
        answers = [future.result() for future in pending]
    for prompt, tokens in zip(prompts, answers, strict=True):
        assert tokens == served.expected(prompt, 400)
    served.server.wait_until_whole()
    assert_nothing_is_held(served.server)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"bad_words": ["fox"]}, "bad_words"),
        ({"dry_multiplier": 1.0}, "dry"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"use_beam_search": True, "n": 2}, "use_beam_search"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_fields_that_need_the_tokens_before_are_refused(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    status, answer = served.server.post(
        "/v1/completions", {"prompt": "the", "max_tokens": 4} | fields
    )
    assert status == 400 and answer["error"]["param"] == param, answer
    assert "block-diffusion" in answer["error"]["message"]


def test_a_diffusion_model_embeds_nothing(served: Served) -> None:
    status, answer = served.server.post("/v1/embeddings", {"input": "the"})
    assert status == 400 and "block-diffusion" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--block-size", "12"), "--block-size 12 must be a multiple of the model's blocks of 8"),
        (("--pipeline-parallel-size", "2"), "--pipeline-parallel-size 2 is not supported"),
        (("-sc", '{"num_speculative_tokens": 2}'), "--speculative-config is not supported"),
        (("--max-num-batched-tokens", "9"), "--max-num-batched-tokens 9 must be at least 16"),
        (("--max-model-len", "7"), "--max-model-len 7 is below the 8 tokens of a block"),
        (("--model-impl", "transformers"), "--model-impl transformers cannot denoise"),
        (("--dllm-algorithm-config", '{"thresh": 1}'), "unknown field `thresh`"),
        (("--dllm-algorithm", "Entropy"), "must be one of LowConfidence, JointThreshold"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_settings_that_do_not_fit_are_refused(
    served: Served, tmp_path: Path, flags: tuple[str, ...], problem: str
) -> None:
    sdar(tmp_path, 8)
    with Server(str(tmp_path), *FLAGS, *flags, wait=False) as server:
        server.wait_for(problem)


def test_settings_of_a_diffusion_model_are_refused_for_others(tmp_path: Path) -> None:
    sdar(tmp_path, 8)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with Server(str(tmp_path), *FLAGS, "--dllm-algorithm", "LowConfidence", wait=False) as server:
        server.wait_for("tiny (qwen3) is not a block-diffusion model")
