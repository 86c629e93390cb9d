"""Prompts of responses: answers that the model continues, prompts without an answer, and templates of requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.requests.responses import check_events
from support.servers.frontend_process import MODEL, FrontendProcess, sound_frontend

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}:{{ m['content'] }}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant:{% endif %}"
)
BEGUN = {"type": "message", "role": "assistant", "content": "A, B,"}


@pytest.fixture(scope="module")
def frontend() -> Iterator[FrontendProcess]:
    with sound_frontend(step_s=0.0005, max_model_len=1024, chat_template=TEMPLATE) as process:
        yield process


@pytest.fixture(scope="module")
def client(frontend: FrontendProcess) -> Iterator[openai.OpenAI]:
    with frontend.client() as openai_client:
        yield openai_client


def prompt_of(client: openai.OpenAI, items: list[Any]) -> str:
    """Return the prompt that the items become."""
    response = client.responses.create(
        model=MODEL,
        input=items,
        max_output_tokens=2,
        extra_body={"enable_response_messages": True},
    )
    [prompt] = response.model_extra["input_messages"]
    return str(prompt["message"])


@pytest.mark.parametrize("status", ["in_progress", "incomplete"])
def test_answer_continues_a_last_message_that_is_not_complete(
    client: openai.OpenAI, status: str
) -> None:
    question = {"role": "user", "content": "Go!"}
    partial = BEGUN | {"status": status}
    begun = "[user:Go!][assistant:A, B,"
    assert prompt_of(client, [question, partial]) == begun
    for complete in (BEGUN, BEGUN | {"status": "completed"}):
        assert prompt_of(client, [question, complete]) == f"{begun}][assistant:"
    assert prompt_of(client, [question, partial, question]) == f"{begun}][user:Go!][assistant:"
    assert prompt_of(client, [question, partial | {"content": ""}]).endswith("[assistant:")


def test_an_incomplete_output_can_be_sent_back(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="a b c d", max_output_tokens=2)
    assert first.status == "incomplete"
    [message] = first.output
    question = {"role": "user", "content": "a b c d"}
    prompt = prompt_of(client, [question, message])
    assert prompt == f"[user:a b c d][assistant:{first.output_text}"


def test_prewarm_computes_the_prompt_without_an_answer(
    frontend: FrontendProcess, client: openai.OpenAI
) -> None:
    body = {"model": MODEL, "input": "a b c d", "prompt_cache_options": {"prewarm": True}}
    assert check_events(frontend, body) == []
    fields: Any = {**body, "max_output_tokens": 9}
    warm = client.responses.create(**fields)
    assert (warm.status, warm.output, warm.usage.output_tokens) == ("completed", [], 0)
    assert "prewarm" not in warm.prompt_cache_options.model_dump(exclude_none=True)
    later = client.responses.create(
        model=MODEL, input="Hi", previous_response_id=warm.id, max_output_tokens=2
    )
    assert later.output_text
    waiting = client.responses.create(**fields, background=True)
    with client.responses.stream(response_id=waiting.id) as stream:
        assert [event.type for event in stream][-1] == "response.completed"
    assert client.responses.retrieve(waiting.id).output == []


def test_template_may_be_among_its_variables() -> None:
    template = {"chat_template": "{{ messages[-1]['content'] }}!"}
    body = {"input": "Hi", "max_output_tokens": 2, "chat_template_kwargs": template}
    body["enable_response_messages"] = True
    with FrontendProcess(trust_request_chat_template=True) as trusting:
        answer = trusting.http.post("/v1/responses", json=body).json()
        assert answer["input_messages"][0]["message"] == "Hi!"
        wrong = body | {"chat_template_kwargs": {"chat_template": 5}}
        error = trusting.http.post("/v1/responses", json=wrong).json()["error"]
        assert error["param"] == "chat_template_kwargs.chat_template"


def test_templates_among_variables_are_refused_without_trust(frontend: FrontendProcess) -> None:
    body = {"input": "Hi", "chat_template_kwargs": {"chat_template": "x"}}
    answer = frontend.http.post("/v1/responses", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "chat_template_kwargs.chat_template"
    assert "--trust-request-chat-template" in error["message"]


FILE = {"type": "input_file", "file_id": "file_1"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"input": [{"role": "user", "content": [FILE]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
    ],
)
def test_errors_name_the_field_of_a_missing_object(
    frontend: FrontendProcess, fields: dict[str, Any], param: str
) -> None:
    answer = frontend.http.post("/v1/responses", json={"input": "Hi"} | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, param)
