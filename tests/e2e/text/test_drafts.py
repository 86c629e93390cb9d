"""A server with drafts gives the same output as one without, in fewer steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.checkpoints.shallow_model import shallow_model
from support.servers.server import Server, assert_nothing_is_held

FLAGS = ("--max-model-len", "512", "--max-num-seqs", "8", "--served-model-name", "m")
TEXT = "The fox met a hen, a goose and a duck. The hen ran, the goose swam and the duck flew away."
PROMPT = f"Copy: {TEXT}\nCopy: {TEXT}\nCopy: "
SCHEMA = {
    "type": "array",
    "minItems": 4,
    "items": {
        "type": "object",
        "properties": {"animal": {"enum": ["fox", "hen", "duck"]}, "count": {"type": "integer"}},
        "required": ["animal", "count"],
    },
}
WORDS = ("words[max_tokens=30]: /[A-Za-z ,.]+/", 'words[stop="wam"]: /[A-Za-z ,.]+/')
SAMPLING_FEATURES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 6, "n": 2},
    {"temperature": 0, "stop": ["swam and"]},
    {"temperature": 0, "max_tokens": 13},
    {"temperature": 0, "min_tokens": 40, "stop": ["duck flew"]},
    {"temperature": 0, "presence_penalty": 0.3},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0, "structured_outputs": {"regex": "(The [a-z ,]+[.] )+"}},
    *(
        {"temperature": 0, "structured_outputs": {"grammar": f'start: words "!"\n{words}'}}
        for words in WORDS
    ),
    {"temperature": 0.7, "seed": 3, "structured_outputs": {"json": SCHEMA}, "ignore_eos": False},
]


@pytest.fixture(scope="module")
def drafting() -> Iterator[Server]:
    # Otherwise the number of drafts would depend on measured times.
    always = {"method": "suffix", "num_speculative_tokens": 8, "adaptive": False}
    with Server(shallow_model(), *FLAGS, "--speculative-config", json.dumps(always)) as server:
        yield server


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    off = ("--speculative-config", '{"num_speculative_tokens": 0}')
    with Server(shallow_model(), *FLAGS, *off) as server:
        yield server


def ask(server: Server, features: dict[str, Any]) -> tuple[list[Any], dict[str, int]]:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, **features}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    choices = [
        (choice["text"], choice["finish_reason"], choice["stop_reason"], choice["logprobs"])
        for choice in answer["choices"]
    ]
    return choices, answer["usage"]


@pytest.mark.parametrize(
    "features", SAMPLING_FEATURES, ids=lambda features: "-".join(map(str, features))
)
def test_drafts_do_not_change_the_output_of_a_request(
    drafting: Server, plain: Server, features: dict[str, Any]
) -> None:
    (choices, usage), (expected, expected_usage) = ask(drafting, features), ask(plain, features)
    assert choices == expected
    assert usage["completion_tokens"] == expected_usage["completion_tokens"]


def test_llama_cpp_timings_count_verified_and_accepted_drafts(
    drafting: Server, plain: Server
) -> None:
    body = {"prompt": PROMPT, "n_predict": 60, "ignore_eos": True, "temperature": 0}
    status, answer = drafting.post("/completion", body)
    assert status == 200, answer
    timings = answer["timings"]
    assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]
    assert timings["draft_n_accepted"] < timings["predicted_n"] == 60
    status, answer = plain.post("/completion", body)
    assert status == 200, answer
    assert "draft_n" not in answer["timings"]


def test_drafts_copy_repeated_text_in_fewer_steps(drafting: Server, plain: Server) -> None:
    def count(server: Server) -> tuple[float, float, float]:
        names = (
            "scheduler_steps",
            "spec_decode_num_draft_tokens",
            "spec_decode_num_accepted_tokens",
        )
        before = [server.metric(f"engine:{name}_total") for name in names]
        ask(server, {"temperature": 0})
        steps, drafts, accepted = (
            server.metric(f"engine:{name}_total") - start
            for name, start in zip(names, before, strict=True)
        )
        return steps, drafts, accepted

    (few, drafts, accepted), (many, *none) = count(drafting), count(plain)
    assert few < 0.9 * many
    # The number of drafts in a step depends on which outputs had arrived when it was scheduled.
    assert 15 < accepted <= drafts
    assert none == [0, 0]


def test_predicted_answer_takes_fewer_steps(drafting: Server, plain: Server) -> None:
    messages = [{"role": "user", "content": "Write a short poem about the sea."}]
    body = {"model": "m", "messages": messages, "max_tokens": 80, "temperature": 0.7, "seed": 4}

    def chat(server: Server, **fields: Any) -> tuple[Any, dict[str, Any], float]:
        before = server.metric("engine:scheduler_steps_total")
        status, answer = server.post("/v1/chat/completions", body | fields)
        assert status == 200, answer
        num_steps = server.metric("engine:scheduler_steps_total") - before
        return answer["choices"], answer["usage"], num_steps

    expected, _, many = chat(plain)
    text = expected[0]["message"]["content"]
    right = {"type": "content", "content": text}
    edited = {"type": "content", "content": text.replace("the", "a")}
    wrong = {"type": "content", "content": "Unlike anything in this poem: " * 9}
    choices, usage, few = chat(drafting, prediction=right)
    assert choices == expected
    assert few < 0.5 * many
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 40
    for prediction in (edited, wrong):
        choices, usage, _ = chat(drafting, prediction=prediction)
        assert choices == expected
    choices, usage, _ = chat(plain, prediction=right)
    assert choices == expected
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 0


def test_tokens_forced_by_a_schema_take_fewer_steps(drafting: Server, plain: Server) -> None:
    names = ("characteristics_of_the_animal", "number_of_legs", "geographical_distribution")
    schema = {
        "type": "object",
        "properties": {name: {"enum": ["many", "few"]} for name in names},
        "required": names,
        "additionalProperties": False,
    }

    def count_steps(server: Server) -> tuple[float, Any]:
        before = server.metric("engine:scheduler_steps_total")
        features = {"structured_outputs": {"json": schema}, "temperature": 0, "ignore_eos": False}
        choices, _ = ask(server, features)
        return server.metric("engine:scheduler_steps_total") - before, choices

    (few, choices), (many, expected) = count_steps(drafting), count_steps(plain)
    assert choices == expected
    assert few < 0.9 * many


def test_an_answer_ends_with_its_grammar_even_before_min_tokens(
    drafting: Server, plain: Server
) -> None:
    choices = {"choice": ["a duck and a fish", "a fish and a duck"]}
    features = {"structured_outputs": choices, "min_tokens": 20, "ignore_eos": False}
    for server in (drafting, plain):
        ((text, finish_reason, *_),), _ = ask(server, {"temperature": 0, **features})
        assert text in choices["choice"]
        assert finish_reason == "stop"


def test_drafts_do_not_change_outputs_of_concurrent_requests(
    drafting: Server, plain: Server
) -> None:
    expected = [ask(plain, features)[0] for features in SAMPLING_FEATURES]
    with ThreadPoolExecutor(len(SAMPLING_FEATURES)) as pool:
        choices = list(pool.map(lambda features: ask(drafting, features)[0], SAMPLING_FEATURES))
    assert choices == expected
    assert_nothing_is_held(drafting)
