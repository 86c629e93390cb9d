"""Models with recurrent layers, shared keys, compressed attention or embeddings of n-grams are served like others.

Prefixes are reused, and nothing changes a request's text.
"""

from __future__ import annotations

import concurrent.futures
import json
import random
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import LLM, SamplingParams
from support.checkpoints.likely_tokens import likely_tokens
from support.checkpoints.tiny import layers_directory, sentencepiece_tokenizer
from support.families.published.mixtures.deepseek_v4_1 import save_deepseek_v4_1
from support.servers.server import Server, assert_nothing_is_held

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
FLAGS = (
    *("--dtype", "float32", "--served-model-name", "tiny", "--chat-template", TEMPLATE),
    *("--max-num-batched-tokens", "48", "--max-num-seqs", "6", "--kv-host-gib", "0.01"),
    *("--inject-preemption", "0.02"),
)


KINDS = ("delta net", "mamba", "gemma 3n", "compressed", "n-grams", "passes", "shared entries")
IN_TORCH = ("n-grams", "shared entries")


@pytest.fixture(scope="module", params=KINDS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Any]]:
    path = tmp_path_factory.mktemp("tiny")
    if request.param == "shared entries":
        tokenizer = sentencepiece_tokenizer()
        sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024}
        model: Any = save_deepseek_v4_1(path, tokenizer.backend_tokenizer, **sizes)
        tokenizer.save_pretrained(path)
    else:
        path, model = layers_directory(path, request.param)
    backend = "torch" if request.param in IN_TORCH else "native"
    with Server(str(path), *FLAGS, "--cpu-backend", backend) as server:
        yield server, model


def test_a_block_that_is_smaller_than_a_state_is_refused_with_the_size(tmp_path: Path) -> None:
    path, _ = layers_directory(tmp_path)
    with Server(str(path), *FLAGS, "--block-size", "16", wait=False) as server:
        server.wait_for("use at least --block-size 89, or omit it")


def complete(server: Server, prompt: list[int], count: int) -> list[int]:
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    status, answer = server.post("/v1/completions", body | {"return_token_ids": True})
    assert status == 200, answer
    return answer["choices"][0]["token_ids"]


def test_tokens_of_preempted_requests_equal_those_of_transformers(served) -> None:
    server, model = served
    rng = random.Random(3)
    shared = [rng.randrange(4, 300) for _ in range(130)]
    prompts = [
        shared[: rng.randrange(130)] + [rng.randrange(4, 300) for _ in range(rng.randrange(1, 60))]
        for _ in range(12)
    ]
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda p: complete(server, p, 40), prompts))
    for prompt, tokens in zip(prompts, answers, strict=True):
        assert len(tokens) == 40 and tokens == likely_tokens(model, prompt, tokens)
    assert server.metric("engine:num_preemptions_total") > 0
    assert_nothing_is_held(server)


@pytest.mark.parametrize("kind", ["delta net", "gemma 3n"])
def test_drafts_do_not_change_the_text_of_preempted_requests(tmp_path: Path, kind: str) -> None:
    path, _ = layers_directory(tmp_path, kind)
    off = ("--speculative-config", '{"num_speculative_tokens": 0}')
    always = ("--speculative-config", '{"num_speculative_tokens": 8, "adaptive": false}')
    rng, words = (
        random.Random(4),
        ["the", "fox", "met", "a", "hen", "and", "a", "duck", "by", "old", "stones"],
    )
    contents = [" ".join(rng.choices(words, k=rng.randrange(2, 40))) for _ in range(8)]
    drafts, none = (str(path), *FLAGS, *always), (str(path), *FLAGS, *off)
    with Server(*drafts) as drafting, Server(*none) as plain:

        def answer(server: Server, index: int, **fields: object) -> str:
            messages = [{"role": "user", "content": contents[index]}]
            sampling = {"temperature": 0.7, "seed": index} if index % 2 else {"temperature": 0}
            body = {"messages": messages, "max_tokens": 90, "ignore_eos": True}
            status, answer = server.post("/v1/chat/completions", body | sampling | fields)
            assert status == 200, answer
            return answer["choices"][0]["message"]["content"]

        expected = [answer(plain, index) for index in range(8)]
        predictions = [text[:50] + "?" + text[51:] for text in expected]
        assert [answer(drafting, index) for index in range(8)] == expected

        def predict(index: int) -> str:
            prediction = {"type": "content", "content": predictions[index]}
            return answer(drafting, index, prediction=prediction)

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            assert list(pool.map(predict, range(8))) == expected
        assert drafting.metric("engine:num_preemptions_total") > 0
        accepted = drafting.metric("engine:spec_decode_num_accepted_tokens_total")
        assert 50 < accepted < drafting.metric("engine:spec_decode_num_draft_tokens_total")
        assert plain.metric("engine:spec_decode_num_draft_tokens_total") == 0
        assert_nothing_is_held(drafting)


def test_evicted_states_are_copied_back_from_cpu_memory(tmp_path: Path) -> None:
    path, _ = layers_directory(tmp_path, "convolution")
    rng = random.Random(6)
    conversations = [[rng.randrange(4, 300) for _ in range(400)] for _ in range(2)]

    def ask(**options: Any) -> list[tuple[list[int], int | None]]:
        """Return the tokens and the number of cached tokens of two conversations that take turns."""
        with LLM(str(path), dtype="float32", max_model_len=500, max_num_seqs=1, **options) as llm:
            answers = [
                llm.generate(prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
                for prompt in conversations * 2
            ]
        return [(answer.outputs[0].token_ids, answer.num_cached_tokens) for (answer,) in answers]

    recomputed, copied = ask(), ask(kv_host_gib=0.05)
    assert [tokens for tokens, _ in copied] == [tokens for tokens, _ in recomputed]
    # By default the cache holds as many requests as may run, so each conversation evicts the other.
    assert [count for _, count in recomputed[2:]] == [0, 0]
    assert all(count is not None and count >= 256 for _, count in copied[2:])


def test_a_chat_reuses_the_state_of_its_previous_turn(served) -> None:
    server, _ = served
    messages = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog " * 40}]
    body = {"messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answers = [server.post("/v1/chat/completions", body)[1] for _ in range(2)]
    first, second = (answer["choices"][0]["message"]["content"] for answer in answers)
    assert first == second
    messages += [
        {"role": "assistant", "content": first},
        {"role": "user", "content": "seven wizards brew tea"},
    ]
    answers.append(server.post("/v1/chat/completions", body)[1])
    for answer in answers[1:]:
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 64, usage


@pytest.mark.parametrize("kind", ["delta net", "mamba", "convolution"])
def test_prompts_share_the_state_after_a_common_beginning(tmp_path: Path, kind: str) -> None:
    path, model = layers_directory(tmp_path, kind)
    rng = random.Random(7)
    shared = [rng.randrange(4, 300) for _ in range(290)]
    prompts = [shared + [rng.randrange(4, 300) for _ in range(150)] for _ in range(4)]
    found = []
    with Server(str(path), "--dtype", "float32", "--enable-prompt-tokens-details") as server:
        for prompt in prompts:
            body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            status, answer = server.post("/v1/completions", body | {"return_token_ids": True})
            assert status == 200, answer
            tokens = answer["choices"][0]["token_ids"]
            assert tokens == likely_tokens(model, prompt, tokens)
            found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert_nothing_is_held(server)
    # The first prompt has no state there, and the second one stores it.
    assert found[:2] == [0, 0] and found[2] == found[3] > 150


def test_a_stream_goes_on_after_the_core_was_killed(served) -> None:
    server, _ = served
    prompt = "the old tower " * 30
    body = {"prompt": prompt, "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    undisturbed = server.post("/v1/completions", body)[1]["choices"][0]["text"]
    request = urllib.request.Request(
        server.url + "/v1/completions",
        data=json.dumps(body | {"stream": True}).encode(),
        headers={"content-type": "application/json"},
    )
    text, num_events = "", 0
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            text += json.loads(line[6:])["choices"][0]["text"]
            num_events += 1
            if num_events in (20, 60):
                server.child("core 0").kill()
    assert text == undisturbed
    server.wait_until_whole()
    assert_nothing_is_held(server)
