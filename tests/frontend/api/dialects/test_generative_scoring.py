"""vLLM's `/generative_scoring` and OpenAI's decisions. The core gives token t the log-probability -t / 1000."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import openai
import pytest
from engine.protocol.arrays import int32_view
from support.servers.frontend_process import MODEL, FrontendProcess

pytestmark = pytest.mark.slow

BODY = {"query": "A fruit?", "items": [" apple", " hammer"], "label_token_ids": [700, 7, 700]}


def score(frontend: FrontendProcess, **fields: Any) -> Any:
    response = frontend.post("/generative_scoring", **BODY | fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_items_get_the_probabilities_of_the_labels(frontend: FrontendProcess) -> None:
    probabilities = [math.exp(-0.7), math.exp(-0.007)]
    share = [each / sum(probabilities) for each in probabilities]
    answer = score(frontend)
    assert answer["object"] == "list" and answer["id"].startswith("generative-scoring-")
    assert [each["index"] for each in answer["data"]] == [0, 1]
    for each in answer["data"]:
        assert each["scores"] == pytest.approx(share) and each["score"] == each["scores"][0]
    for each in score(frontend, apply_softmax=False)["data"]:
        assert each["scores"] == pytest.approx(probabilities)
    query = frontend.tokenizer.encode(BODY["query"])
    items = [frontend.tokenizer.encode(item) for item in BODY["items"]]
    assert answer["usage"]["prompt_tokens"] == 2 * len(query) + sum(map(len, items))
    by_ids = score(frontend, query=list(query), items=[*map(list, items)], item_first=True)
    assert by_ids["data"] == answer["data"]
    added = [m for m in frontend.core.received if hasattr(m, "requests")][-1]
    assert int32_view(added.requests[-1].prompt_token_ids).tolist() == [*items[-1], *query]


def test_sglang_clients_get_all_scores_of_each_item(frontend: FrontendProcess) -> None:
    response = frontend.post("/v1/score", **BODY, item_first=True)
    answer = response.json()
    assert response.status_code == 200, response.text
    assert (answer["object"], answer["usage"]["completion_tokens"]) == ("scoring", 0)
    for scores in answer["scores"]:
        assert scores == pytest.approx([math.exp(-0.7), math.exp(-0.007)])
    softmax = frontend.post("/v1/score", **BODY | {"items": " a"}, apply_softmax=True).json()
    assert sum(softmax["scores"][0]) == pytest.approx(1)
    refused = frontend.post("/v1/score", **BODY | {"label_token_ids": []})
    assert refused.json()["error"]["param"] == "label_token_ids"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": None}, "query"),
        ({"items": None}, "items"),
        ({"items": []}, "items"),
        ({"items": [" a", [1]]}, "items[1]"),
        ({"items": ["w " * 600]}, "items[0]"),
        ({"label_token_ids": None}, "label_token_ids"),
        ({"label_token_ids": [10**6]}, "label_token_ids"),
        ({"label_token_ids": [*range(129)]}, "label_token_ids"),
        ({"return_pooled_hidden_states": True}, "return_pooled_hidden_states"),
    ],
)
def test_errors_name_the_field(frontend: FrontendProcess, fields: dict, param: str) -> None:
    response = frontend.post("/generative_scoring", **BODY | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


PNG = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
QUESTIONS: list[dict[str, Any]] = [
    {"type": "predicate", "instructions": "Is it broken?"},
    {
        "type": "choice",
        "name": "unit",
        "instructions": [{"type": "input_text", "text": "Who helps?"}],
        "choices": [{"value": True}, {"value": "true"}, {"value": "b", "description": "Bills"}],
    },
    {
        "type": "score",
        "instructions": "How bad?",
        "levels": [{"label": "fine"}, {"label": "broken"}],
    },
]


def test_decisions_have_the_probabilities_of_all_options(
    frontend: FrontendProcess, client: openai.OpenAI
) -> None:
    parts = [{"type": "input_json", "data": {"screen": "cracked"}}]
    given: Any = [
        {"role": "developer", "content": "Be fair."},
        {"role": "user", "content": parts},
    ]
    asked: Any = QUESTIONS
    decision = client.decisions.create(model=MODEL, input=given, questions=asked)
    predicate, choice, score = decision.answers
    ids = [frontend.tokenizer.encode(label, False)[0] for label in "ABC"]
    weights = [math.exp(-token_id / 1000) for token_id in ids]
    assert predicate.type == "predicate" and predicate.name is None
    assert predicate.probability == pytest.approx(weights[0] / sum(weights[:2]))
    assert choice.type == "choice" and (choice.name, choice.choice) == ("unit", True)
    shares = [weight / sum(weights) for weight in weights]
    assert [each.probability for each in choice.probabilities] == pytest.approx(shares)
    assert [each.value for each in choice.probabilities] == [True, "true", "b"]
    assert choice.confidence == pytest.approx(weights[0])
    assert score.type == "score" and score.score == pytest.approx(weights[1] / sum(weights[:2]))
    assert [(each.value, each.label) for each in score.probabilities] == [
        (0, "fine"),
        (1, "broken"),
    ]
    usage = decision.usage
    assert (usage.output_tokens, usage.total_tokens) == (3, usage.input_tokens + 3)
    added = [m for m in frontend.core.received if hasattr(m, "requests")][-1]
    prompts = [
        frontend.tokenizer.decode(int32_view(request.prompt_token_ids).tolist())
        for request in added.requests
    ]
    assert all(prompt.startswith('{"screen":"cracked"}') for prompt in prompts)
    assert "\n\nWho helps?\n\nA. true\nB. true\nC. b: Bills\n" in prompts[1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_json", "data": 1}]}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [PNG]}]}, "input"),
        ({"questions": []}, "questions"),
        ({"joint": True}, "joint"),
        ({"questions": [QUESTIONS[0] | {"type": "guess"}]}, "questions[0].type"),
        ({"questions": [QUESTIONS[0] | {"instructions": [{}]}]}, "questions[0].instructions[0]"),
        ({"questions": [QUESTIONS[1] | {"choices": [{"value": "a"}]}]}, "questions[0].choices"),
        ({"questions": [QUESTIONS[1] | {"choices": [{"value": "a"}] * 2}]}, "questions[0].choices"),
        ({"questions": [QUESTIONS[1] | {"choices": [{}]}]}, "questions[0].choices[0].value"),
        ({"questions": [*QUESTIONS[:2], {"type": "score"}]}, "questions[2]"),
        ({"questions": [QUESTIONS[2] | {"levels": None}]}, "questions[0].levels"),
    ],
)
def test_wrong_decisions_are_refused(
    frontend: FrontendProcess, fields: dict[str, Any], param: str
) -> None:
    body = {"input": "Hi", "questions": QUESTIONS[:1]} | fields
    error = frontend.post("/v1/decisions", **body).json()["error"]
    assert error["param"].startswith(param), error


SYSTEM_ONE: dict[str, Any] = {
    "angry": {"type": "noul", "instructions": "Is it angry?", "criteria": {"true": "It shouts."}},
    "route": {
        "type": "choice",
        "instructions": {"ask": "Who helps?"},
        "criteria": {"billing": "Bills", "shipping": None},
    },
    "urgency": {"type": "score", "instructions": "How soon?", "criteria": ["later", "now"]},
}


def test_systemone_answers_by_name(frontend: FrontendProcess) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "It is late."}]}]
    for state, shown in (({"plan": "pro"}, '{"plan":"pro"}'), (messages, "It is late.")):
        body = {"state": state, "questions": SYSTEM_ONE, "videos": []}
        answer = frontend.post("/v1/systemone", **body).json()
        added = [m for m in frontend.core.received if hasattr(m, "requests")][-1]
        prompts = [
            frontend.tokenizer.decode(int32_view(request.prompt_token_ids).tolist())
            for request in added.requests
        ]
        assert all(shown in prompt for prompt in prompts)
        assert "Is it angry?\ntrue: It shouts.\n\nA. true\nB. false\n" in prompts[0]
        assert "A. billing: Bills\nB. shipping\n" in prompts[1]
        assert (answer["model"], answer["usage"]["output_tokens"]) == (MODEL, 0)
    weights = [math.exp(-frontend.tokenizer.encode(label, False)[0] / 1000) for label in "AB"]
    first, second = (weight / sum(weights) for weight in weights)
    near = partial(pytest.approx, abs=1e-6)
    angry, route, urgency = answer["answers"].values()
    assert (angry["noul"], angry["probabilities"]["no"]) == (near(first), near(second))
    assert answer["object"] == "structured_decision" and [*answer["diagnostics"]] == [*SYSTEM_ONE]
    for each in answer["diagnostics"].values():
        assert each == {"label_mass": near(sum(weights)), "argmax_is_label": False}
    assert (route["choice"], route["confidence"]) == ("billing", near(2 * first - 1))
    assert route["probabilities"] == pytest.approx({"billing": first, "shipping": second})
    assert (urgency["score"], urgency["confidence"]) == (
        near(second),
        near(1 - 2 * second),
    )
    assert urgency["legend"] == {"0": "later", "1": "now"}


def test_systemone_asks_about_a_single_option_without_instructions(
    frontend: FrontendProcess,
) -> None:
    questions = {"q": {"type": "choice", "criteria": {"billing": None}}}
    body = {"state": "It is late.", "questions": questions}
    answer = frontend.post("/v1/systemone", **body).json()
    [request] = [m for m in frontend.core.received if hasattr(m, "requests")][-1].requests
    prompt = frontend.tokenizer.decode(int32_view(request.prompt_token_ids).tolist())
    assert "It is late.\n\nA. billing\n" in prompt
    asked = answer["answers"]["q"]
    assert (asked["choice"], asked["probabilities"]) == ("billing", {"billing": 1.0})
    assert asked["confidence"] == pytest.approx(answer["diagnostics"]["q"]["label_mass"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"state": None}, "state"),
        (
            {"state": [{"role": "user", "content": [{"type": "input_json", "data": 1}]}]},
            "state[0].content[0].data",
        ),
        ({"questions": {}}, "questions"),
        ({"videos": ["x"]}, "videos"),
        ({"audio": ["x"]}, "audio"),
        (
            {"chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs.enable_thinking",
        ),
        ({"instructions": "Hi", "state": [{"role": "x", "content": "a"}]}, "state[0].role"),
        ({"questions": {"q": {"type": "noul", "instructions": ""}}}, "questions.q.instructions"),
        ({"questions": {"q": {"type": "x", "instructions": "?"}}}, "questions.q.type"),
        (
            {"questions": {"q": {"type": "choice", "instructions": "?", "criteria": {}}}},
            "questions.q.criteria",
        ),
        (
            {"questions": {"q": {"type": "score", "instructions": "?", "criteria": ["a"] * 11}}},
            "questions.q.criteria",
        ),
    ],
)
def test_wrong_questions_of_systemone_are_refused(
    frontend: FrontendProcess, fields: dict[str, Any], param: str
) -> None:
    refused = frontend.post("/v1/systemone", **({"state": "Hi", "questions": SYSTEM_ONE} | fields))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
