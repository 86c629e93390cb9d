"""The `prediction` of a chat completion. The core of these tests repeats the last message over and over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine.protocol.arrays import int32_view
from engine.protocol.config import SchedulerConfig, SpeculativeConfig
from engine.protocol.messages import EngineCoreRequest
from support.servers.frontend_process import MODEL, FrontendProcess, sse_events

pytestmark = pytest.mark.slow

PATH = "/v1/chat/completions"
TEXT = "One two three four five"
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def drafting() -> Iterator[FrontendProcess]:
    with FrontendProcess(scheduler=SchedulerConfig(speculative=SpeculativeConfig(8))) as frontend:
        yield frontend


def ask(frontend: FrontendProcess, content: Any, **fields: Any) -> dict[str, Any]:
    prediction = {"type": "content", "content": content}
    response = frontend.post(
        PATH, model=MODEL, messages=MESSAGES, max_tokens=5, prediction=prediction, **fields
    )
    assert response.status_code == 200, response.text
    return response.json()


def last_request(frontend: FrontendProcess) -> EngineCoreRequest:
    added = [m for m in frontend.core.received if hasattr(m, "requests")][-1]
    request: EngineCoreRequest = added.requests[0]
    return request


@pytest.mark.parametrize(
    "content",
    ["One two six", [{"type": "text", "text": "One two"}, {"type": "text", "text": " six"}]],
    ids=["text", "parts"],
)
def test_prediction_reaches_the_core_and_is_counted(
    drafting: FrontendProcess, content: Any
) -> None:
    answer = ask(drafting, content)
    assert answer["choices"][0]["message"]["content"] == TEXT
    predicted = int32_view(last_request(drafting).predicted_token_ids).tolist()
    assert predicted == drafting.tokenizer.encode("One two six")
    assert answer["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 2,
        "rejected_prediction_tokens": 1,
    }


def test_stream_counts_the_prediction_of_every_choice(drafting: FrontendProcess) -> None:
    response = drafting.post(
        PATH,
        messages=MESSAGES,
        max_tokens=5,
        n=3,
        stream=True,
        stream_options={"include_usage": True},
        prediction={"type": "content", "content": "One two six"},
    )
    details = sse_events(response.text)[-1]["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 3}


def test_server_without_drafts_accepts_predictions(frontend: FrontendProcess) -> None:
    answer = ask(frontend, "One two six")
    assert answer["choices"][0]["message"]["content"] == TEXT
    assert not last_request(frontend).predicted_token_ids
    assert answer["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }


def test_empty_prediction_predicts_nothing(drafting: FrontendProcess) -> None:
    answer = ask(drafting, "")
    assert not last_request(drafting).predicted_token_ids
    assert answer["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] == 0


def test_prediction_is_limited_by_the_context_length(drafting: FrontendProcess) -> None:
    limit = drafting.config.model.max_model_len
    ask(drafting, "x " * (limit // 2))
    for content, problem in (("x y " * limit, "tokens"), ("x" * (limit * 256 + 1), "characters")):
        response = drafting.post(
            PATH, messages=MESSAGES, prediction={"type": "content", "content": content}
        )
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "prediction")
        assert error["code"] == "context_length_exceeded"
        assert problem in error["message"] and str(limit) in error["message"]


@pytest.mark.parametrize(
    ("prediction", "param", "problem"),
    [
        ("x", "prediction", "an object"),
        ({}, "prediction.content", "a string or an array of text parts, got null"),
        ({"type": "content", "content": 5}, "prediction.content", "got 5"),
        ({"type": "audio", "content": "x"}, "prediction.type", 'must be "content", got "audio"'),
        ({"content": ["x"]}, "prediction.content[0]", 'must be a text part, got "x"'),
        (
            {"content": [{"text": "x"}, {"type": "image_url", "image_url": "x"}]},
            "prediction.content[1]",
            "must be a text part",
        ),
    ],
)
def test_malformed_prediction_is_rejected(
    frontend: FrontendProcess, prediction: Any, param: str, problem: str
) -> None:
    response = frontend.post(PATH, messages=MESSAGES, prediction=prediction)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert problem in error["message"]
