"""vLLM's `/generative_scoring`. The core gives token t the log-probability -t / 1000."""

from __future__ import annotations

import math
from typing import Any

import pytest
from engine.protocol.arrays import int32_view
from support.frontend_process import FrontendProcess

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
    assert (answer["object"], answer["usage"]["completion_tokens"]) == ("scoring", 2)
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
    ],
)
def test_errors_name_the_field(frontend: FrontendProcess, fields: dict, param: str) -> None:
    response = frontend.post("/generative_scoring", **BODY | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
