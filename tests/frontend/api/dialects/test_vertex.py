"""Google's Vertex AI: predictions for several instances, and the routes that its environment variables name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.servers.frontend_process import FrontendProcess

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "One two"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def frontend() -> Iterator[FrontendProcess]:
    with FrontendProcess() as process:
        yield process


def predict(frontend: FrontendProcess, *instances: Any, **fields: Any) -> list[Any]:
    response = frontend.post("/predict", instances=instances, **fields)
    assert response.status_code == 200, response.text
    predictions: list[Any] = response.json()["predictions"]
    return predictions


def test_each_instance_is_answered_like_its_route(frontend: FrontendProcess) -> None:
    named = [
        {"@requestFormat": "chatCompletions", "stream": True, **CHAT},
        {"@requestFormat": "/v1/completions", "prompt": "One two", "max_tokens": 2},
        {"@requestFormat": "applyTemplate", "messages": CHAT["messages"]},
        {"@requestFormat": "tokenize", "prompt": "One"},
        CHAT,
        {"prompt": "One two", "max_tokens": 2},
    ]
    chat, completion, template, tokens, same_chat, same_completion = predict(frontend, *named)
    for answer in (chat, same_chat):
        assert answer["choices"][0]["message"]["content"] == "One two"
    for answer in (completion, same_completion):
        assert answer["choices"][0]["text"] == "One two"
    assert "One two" in template["prompt"] and len(tokens["tokens"]) == 1
    assert predict(frontend) == []


def test_parameters_apply_to_every_instance(frontend: FrontendProcess) -> None:
    sampling = {"max_new_tokens": 1}
    texts = [{"text": "One two"}, {"text": "Three four"}]
    first, second = predict(frontend, *texts, parameters={"sampling_params": sampling})
    assert first["text"] == "One" and second["text"] == "Three"


def test_an_invalid_instance_fails_alone(frontend: FrontendProcess) -> None:
    failed = [5, {}, {"@requestFormat": "sleep"}, {"@requestFormat": 5}, {"messages": 5}]
    *errors, answer = predict(frontend, *failed, CHAT)
    params = [error["error"]["param"] for error in errors]
    assert params[0] == "instances[0]" and params[-1] == "messages"
    assert set(params[1:-1]) == {f"instances[{i}].@requestFormat" for i in (1, 2, 3)}
    assert answer["choices"][0]["message"]["content"] == "One two"


@pytest.mark.parametrize("instances", [None, [{}] * 129])
def test_number_of_instances_is_limited(frontend: FrontendProcess, instances: Any) -> None:
    error = frontend.post("/predict", instances=instances)
    assert error.status_code == 400 and "at most 128" in error.json()["error"]["message"]


def test_routes_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/v1/endpoints/7:predict")
    monkeypatch.setenv("AIP_HEALTH_ROUTE", "is_alive")
    with FrontendProcess(api_keys=("secret",)) as frontend:
        assert frontend.http.get("/is_alive").status_code == 200
        path = "/v1/endpoints/7:predict"
        assert frontend.http.post(path, json={"instances": [CHAT]}).status_code == 401
        key = {"authorization": "Bearer secret"}
        answer = frontend.http.post(path, json={"instances": [CHAT]}, headers=key).json()
        assert answer["predictions"][0]["choices"][0]["message"]["content"] == "One two"
        assert frontend.http.get("/openapi.json").status_code == 200
