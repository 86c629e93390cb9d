"""vLLM's render routes: what they return makes `/inference/v1/generate` generate what the request would have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.chats import TIME, last_params, marked_tokenizer, user
from support.frontend_process import FrontendProcess

pytestmark = pytest.mark.slow

GENERATE = "/inference/v1/generate"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendProcess]:
    path = marked_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    with FrontendProcess(
        reasoning_parser="qwen3",
        tool_call_parser="hermes",
        tokenizer_path=str(path),
        default_sampling={"temperature": 0.6, "top_k": 7},
    ) as frontend:
        yield frontend


def post(frontend: FrontendProcess, path: str, **fields: Any) -> Any:
    response = frontend.post(path, **fields)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {
            "temperature": 0.5,
            "logit_bias": {"7": 1.5},
            "stop": "x",
            "bad_words": ["no"],
            "logprobs": True,
            "top_logprobs": 2,
            "min_tokens": 2,
            "n": 2,
        },
        {"repetition_detection": {"max_pattern_size": 3, "min_count": 4}, "max_tokens": 5},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"structured_outputs": {"regex": "a+"}},
        {"thinking_token_budget": 5},
        {"thinking_token_budget": 2, "response_format": {"type": "json_object"}},
        {"tools": [TIME], "tool_choice": "required"},
        {"tools": [TIME], "thinking_token_budget": 0},
    ],
)
def test_a_rendered_chat_is_generated_like_the_chat(
    thinking: FrontendProcess, fields: dict[str, Any]
) -> None:
    body = {"messages": user("How much is 2 + 3?"), "seed": 3, "max_tokens": 3} | fields
    chat = post(thinking, "/v1/chat/completions", return_token_ids=True, **body)
    expected = last_params(thinking)
    rendered = post(thinking, "/v1/chat/completions/render", **body)
    assert rendered["token_ids"] == chat["prompt_token_ids"]
    assert rendered["request_id"].startswith("chatcmpl-") and rendered["features"] is None
    answer = post(thinking, GENERATE, **rendered)
    assert last_params(thinking) == expected
    outputs = [choice["token_ids"] for choice in answer["choices"]]
    assert outputs == [choice["token_ids"] for choice in chat["choices"]]


def test_each_prompt_of_a_completion_is_rendered(frontend: FrontendProcess) -> None:
    body = {"prompt": ["One", "Two three"], "seed": 1, "logprobs": 1, "cache_salt": "a"}
    completion = post(frontend, "/v1/completions", return_token_ids=True, **body)
    rendered = post(frontend, "/v1/completions/render", stream=True, request_id="mine", **body)
    assert [each["token_ids"] for each in rendered] == [
        choice["prompt_token_ids"] for choice in completion["choices"]
    ]
    assert [each["request_id"] for each in rendered] == ["cmpl-mine", "cmpl-mine-1"]
    for each, choice in zip(rendered, completion["choices"], strict=True):
        assert each["sampling_params"]["max_tokens"] == 16
        assert (each["cache_salt"], each["priority"], each["stream"]) == ("a", 0, True)
        answer = post(frontend, GENERATE, **each | {"stream": False})
        assert answer["choices"][0]["token_ids"] == choice["token_ids"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions/render", {"messages": []}, "messages"),
        ("/v1/chat/completions/render", {"messages": user("a"), "top_p": 2}, "top_p"),
        ("/v1/completions/render", {"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        ("/v1/completions/render", {"prompt": [1, -1]}, "prompt[1]"),
        ("/v1/completions/render", {"prompt": "a", "max_tokens": 1000}, "max_tokens"),
    ],
)
def test_invalid_requests_are_refused_as_by_the_route_itself(
    frontend: FrontendProcess, path: str, fields: dict[str, Any], param: str
) -> None:
    response = frontend.post(path, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
