"""Amazon SageMaker, and Google Vertex AI: predictions for several instances, and routes named by variables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
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


def test_sagemaker_loads_adapters_and_names_one_in_a_header(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    with FrontendProcess(allow_runtime_lora_updating=True) as frontend:
        body = {"name": "sql", "src": str(tmp_path)}
        assert frontend.post("/adapters", **body).status_code == 200
        named = {"X-Amzn-SageMaker-Adapter-Identifier": "sql"}
        asked = {"prompt": "One two", "max_tokens": 1}
        answer = frontend.http.post("/invocations", json=asked, headers=named).json()
        assert (answer["model"], answer["choices"][0]["text"]) == ("sql", "One")
        for fields, param in (({}, "name"), ({"name": "b", "src": ""}, "src")):
            refused = frontend.post("/adapters", **body | fields)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert frontend.http.delete("/adapters/sql").status_code == 200
        assert frontend.http.delete("/adapters/sql").status_code == 404
        refused = frontend.http.post("/invocations", json=asked, headers=named)
        assert refused.status_code == 404
