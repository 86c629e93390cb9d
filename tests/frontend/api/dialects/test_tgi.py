"""The API of Text Generation Inference. The core repeats the prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.requests.chats import last_params
from support.servers.frontend_process import FrontendProcess

pytestmark = pytest.mark.slow

TEXT = "The sky is\nblue"


def generate(frontend: FrontendProcess, path: str = "/generate", **parameters: Any) -> Any:
    response = frontend.post(path, inputs=TEXT, parameters=parameters)
    assert response.status_code == 200, response.text
    return response.json()


def test_details_have_the_tokens_of_prompt_and_answer(frontend: FrontendProcess) -> None:
    ids = list(frontend.tokenizer.encode(TEXT))
    wanted = {"decoder_input_details": True, "top_n_tokens": 2, "max_new_tokens": len(ids)}
    answer = generate(frontend, **wanted)
    details = answer["details"]
    assert answer["generated_text"] == TEXT
    assert [details[name] for name in ("finish_reason", "generated_tokens", "seed")] == [
        "length",
        len(ids),
        None,
    ]
    for name in ("prefill", "tokens"):
        assert [each["id"] for each in details[name]] == ids
        assert "".join(each["text"] for each in details[name]) == TEXT
    assert [each["logprob"] is None for each in details["prefill"]] == [True, *[False] * 4]
    assert [len(each) for each in details["top_tokens"]] == [2] * len(ids)
    assert not any(each["special"] for each in details["tokens"])


def test_the_route_at_the_root_shows_the_prompt_in_a_list(frontend: FrontendProcess) -> None:
    [answer] = generate(frontend, "/", max_new_tokens=1, seed=5, do_sample=True, details=True)
    assert answer["generated_text"] == f"{TEXT}The"
    assert answer["details"]["seed"] == 5
    [short] = generate(frontend, "/", max_new_tokens=1, return_full_text=False)
    assert short == {"generated_text": "The"}


def test_an_answer_ends_with_its_stop_and_has_headers(frontend: FrontendProcess) -> None:
    parameters = {"stop": [" is"], "best_of": 2, "do_sample": True, "details": True}
    response = frontend.post("/generate", inputs=TEXT, parameters=parameters)
    answer = response.json()
    assert answer["generated_text"] == "The sky is"
    assert answer["details"]["finish_reason"] == "stop_sequence"
    [other] = answer["details"]["best_of_sequences"]
    assert other["generated_text"] == "The sky is"
    assert response.headers["x-generated-tokens"] == "3"
    assert float(response.headers["x-compute-time"]) > 0


@pytest.mark.parametrize(("path", "more"), [("/generate_stream", {}), ("/", {"stream": True})])
def test_a_stream_has_an_event_for_each_token(
    frontend: FrontendProcess, path: str, more: dict
) -> None:
    text = "Öl 🙂 is"
    ids = list(frontend.tokenizer.encode(text))
    parameters = {"max_new_tokens": len(ids), "details": True, "return_full_text": False}
    response = frontend.post(path, inputs=text, parameters=parameters, **more)
    lines = response.text.split("\n\n")[:-1]
    events = [json.loads(line.removeprefix("data:")) for line in lines]
    assert [event["token"]["id"] for event in events] == ids
    assert [event["index"] for event in events] == [*range(1, len(ids) + 1)]
    assert "".join(event["token"]["text"] for event in events) == text
    assert [event["generated_text"] for event in events] == [None] * (len(ids) - 1) + [text]
    assert events[-1]["details"] == {
        "finish_reason": "length",
        "generated_tokens": len(ids),
        "seed": None,
        "input_length": len(ids),
    }


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("regex", "blue|The", "The"),
        ("json", {"properties": {"a": {"const": 1}}, "required": ["a"]}, '{"a": 1}'),
        ("json", '{"const": "The"}', '"The"'),
        ("json_schema", {"schema": {"const": "The"}}, '"The"'),
    ],
)
def test_a_grammar_is_passed_on(
    frontend: FrontendProcess, kind: str, value: object, expected: str
) -> None:
    parameters = {"grammar": {"type": kind, "value": value}, "max_new_tokens": 9}
    response = frontend.post("/generate", inputs=expected, parameters=parameters)
    assert response.status_code == 200, response.text
    grammar = last_params(frontend).structured_output
    assert grammar is not None
    if kind == "json" and isinstance(value, dict):
        assert "object" in str(grammar)


def test_tokens_have_their_places(frontend: FrontendProcess) -> None:
    tokens = frontend.post("/tokenize", inputs=TEXT).json()
    assert [each["id"] for each in tokens] == list(frontend.tokenizer.encode(TEXT))
    assert all(TEXT[each["start"] : each["stop"]] == each["text"] for each in tokens)
    assert "".join(each["text"] for each in tokens) == TEXT
    chat = frontend.post("/chat_tokenize", messages=[{"role": "user", "content": TEXT}]).json()
    assert TEXT in chat["templated_text"]
    assert "".join(each["text"] for each in chat["tokenize_response"]) == chat["templated_text"]
    assert frontend.http.get("/info").json()["max_total_tokens"] == 512


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"inputs": ""}, "inputs is required"),
        ({"inputs": 5}, "inputs"),
        ({"parameters": {"temperature": 0}}, "parameters.temperature must be more than 0"),
        ({"parameters": {"max_new_tokens": 0}}, "parameters.max_new_tokens"),
        ({"parameters": {"max_new_tokens": 10_000}}, "parameters.max_new_tokens"),
        ({"parameters": {"top_p": 2}}, "parameters.top_p"),
        ({"parameters": {"truncate": 0}}, "parameters.truncate"),
        ({"parameters": {"best_of": 2}}, "parameters.best_of"),
        ({"parameters": {"best_of": 2, "seed": 3}}, "parameters.seed"),
        ({"parameters": {"watermark": True}}, "parameters.watermark"),
        ({"parameters": {"grammar": {"type": "x"}}}, "parameters.grammar.type"),
        ({"parameters": {"grammar": {"type": "regex", "value": "("}}}, "parameters.grammar"),
        ({"parameters": {"grammar": {"type": "json", "value": "{"}}}, "parameters.grammar.value"),
        ({"parameters": {"adapter_id": "unknown"}}, "unknown"),
    ],
)
def test_errors_are_texts_with_a_type(frontend: FrontendProcess, body: dict, problem: str) -> None:
    for path in ("/generate", "/"):
        response = frontend.post(path, **{"inputs": "Hi"} | body)
        assert response.status_code == 422, response.text
        assert response.json()["error_type"] == "validation"
        assert problem in response.json()["error"]
