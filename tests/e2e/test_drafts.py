"""A server that drafts says what one says that does not, in fewer steps."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.server import Server, assert_nothing_is_held, default_model

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
    {"temperature": 0.7, "seed": 3, "structured_outputs": {"json": SCHEMA}, "ignore_eos": False},
]


@pytest.fixture(scope="module")
def drafting() -> Iterator[Server]:
    with Server(default_model(), *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    off = ("--speculative-config", '{"num_speculative_tokens": 0}')
    with Server(default_model(), *FLAGS, *off) as server:
        yield server


def ask(server: Server, wish: dict[str, Any]) -> tuple[list[Any], dict[str, int]]:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, **wish}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    told = [
        (choice["text"], choice["finish_reason"], choice["stop_reason"], choice["logprobs"])
        for choice in answer["choices"]
    ]
    return told, answer["usage"]


@pytest.mark.parametrize("wish", SAMPLING_FEATURES, ids=lambda wish: "-".join(map(str, wish)))
def test_one_alone_is_told_the_same(drafting: Server, plain: Server, wish: dict[str, Any]) -> None:
    (told, usage), (wanted, wanted_usage) = ask(drafting, wish), ask(plain, wish)
    assert told == wanted
    assert usage["completion_tokens"] == wanted_usage["completion_tokens"]


def test_copies_take_fewer_steps(drafting: Server, plain: Server) -> None:
    def count_steps(server: Server) -> float:
        before = server.metric("engine:scheduler_steps_total")
        ask(server, {"temperature": 0})
        return server.metric("engine:scheduler_steps_total") - before

    # How many drafts a step gets depends on what had come when it was scheduled.
    assert count_steps(drafting) < 0.75 * count_steps(plain)
    accepted = drafting.metric("engine:spec_decode_num_accepted_tokens_total")
    assert 30 < accepted <= drafting.metric("engine:spec_decode_num_draft_tokens_total")
    assert plain.metric("engine:spec_decode_num_draft_tokens_total") == 0


def test_predicted_answer_takes_fewer_steps(drafting: Server, plain: Server) -> None:
    messages = [{"role": "user", "content": "Write a short poem about the sea."}]
    body = {"model": "m", "messages": messages, "max_tokens": 80, "temperature": 0.7, "seed": 4}

    def chat(server: Server, **fields: Any) -> tuple[Any, dict[str, Any], float]:
        before = server.metric("engine:scheduler_steps_total")
        status, answer = server.post("/v1/chat/completions", body | fields)
        assert status == 200, answer
        num_steps = server.metric("engine:scheduler_steps_total") - before
        return answer["choices"], answer["usage"], num_steps

    wanted, _, many = chat(plain)
    text = wanted[0]["message"]["content"]
    right = {"type": "content", "content": text}
    edited = {"type": "content", "content": text.replace("the", "a")}
    wrong = {"type": "content", "content": "Unlike anything in this poem: " * 9}
    choices, usage, few = chat(drafting, prediction=right)
    assert choices == wanted
    assert few < 0.5 * many
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 40
    for prediction in (edited, wrong):
        choices, usage, _ = chat(drafting, prediction=prediction)
        assert choices == wanted
    choices, usage, _ = chat(plain, prediction=right)
    assert choices == wanted
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 0


def test_what_a_schema_leaves_no_choice_about_takes_fewer_steps(
    drafting: Server, plain: Server
) -> None:
    names = ("characteristics_of_the_animal", "number_of_legs", "geographical_distribution")
    schema = {
        "type": "object",
        "properties": {name: {"enum": ["many", "few"]} for name in names},
        "required": names,
        "additionalProperties": False,
    }

    def count_steps(server: Server) -> tuple[float, Any]:
        before = server.metric("engine:scheduler_steps_total")
        wish = {"structured_outputs": {"json": schema}, "temperature": 0, "ignore_eos": False}
        told, _ = ask(server, wish)
        return server.metric("engine:scheduler_steps_total") - before, told

    (few, told), (many, wanted) = count_steps(drafting), count_steps(plain)
    assert told == wanted
    assert few < 0.75 * many


def test_many_at_once_are_told_what_they_are_told_alone(drafting: Server, plain: Server) -> None:
    wanted = [ask(plain, wish)[0] for wish in SAMPLING_FEATURES]
    with ThreadPoolExecutor(len(SAMPLING_FEATURES)) as pool:
        told = list(pool.map(lambda wish: ask(drafting, wish)[0], SAMPLING_FEATURES))
    assert told == wanted
    assert_nothing_is_held(drafting)
