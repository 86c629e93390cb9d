"""vLLM's `/inference/v1/generate`. The core repeats the prompt, and gives token t the log-probability -t / 1000."""

from __future__ import annotations

import base64
import io
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.servers.frontend_process import FrontendProcess

pytestmark = pytest.mark.slow

PATH = "/inference/v1/generate"
PROMPT = [700, 7, 701, 8]
CANDIDATES = "sampling_params.prompt_logprob_token_ids"


def generate(frontend: FrontendProcess, *, sampling: dict | None = None, **fields: Any) -> Any:
    params = {"max_tokens": 6, "temperature": 0} | (sampling or {})
    response = frontend.post(PATH, token_ids=PROMPT, sampling_params=params, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_token_ids_are_continued_as_in_completions(frontend: FrontendProcess) -> None:
    sampling = {"logprobs": 2, "prompt_logprobs": 1}
    answer = generate(frontend, sampling=sampling, return_token_ids=True)
    completion = frontend.post(
        "/v1/completions",
        prompt=PROMPT,
        max_tokens=6,
        temperature=0,
        logprobs=2,
        prompt_logprobs=1,
        return_token_ids=True,
    ).json()
    [choice], [expected] = answer["choices"], completion["choices"]
    assert answer["output_mode"] == "tokens" and "text" not in choice
    assert re.fullmatch("[0-9a-f]{32}", answer["request_id"])
    assert answer["prompt_token_ids"] == PROMPT and answer["usage"] == completion["usage"]
    assert answer["prompt_logprobs"] == expected["prompt_logprobs"]
    for name in ("token_ids", "finish_reason", "stop_reason"):
        assert choice[name] == expected[name]
    positions = choice["logprobs"]["content"]
    assert [each["token_id"] for each in positions] == choice["token_ids"]
    assert [each["logprob"] for each in positions] == expected["logprobs"]["token_logprobs"]
    for position in positions:
        first, *others = position["top_logprobs"]
        assert first == {name: position[name] for name in ("token_id", "logprob", "rank")}
        assert first["token_id"] not in [each["token_id"] for each in others]


def test_a_stream_has_the_tokens_of_the_whole_answer(frontend: FrontendProcess) -> None:
    fields: dict[str, Any] = {"output_mode": "text", "sampling": {"logprobs": 1}}
    [whole] = generate(frontend, **fields)["choices"]
    assert whole["logprobs"]["content"][0]["token"] in whole["text"]
    params = {"max_tokens": 6, "temperature": 0, "logprobs": 1}
    streamed = frontend.post(
        PATH,
        token_ids=PROMPT,
        sampling_params=params,
        output_mode="text",
        return_token_ids=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    *events, done = [line[6:] for line in streamed.text.split("\n") if line.startswith("data: ")]
    assert done == "[DONE]"
    *chunks, last = map(json.loads, events)
    assert last["usage"]["completion_tokens"] == 6 and last["choices"] == []
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [PROMPT] + [None] * (
        len(chunks) - 1
    )
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    entries = [entry for part in parts for entry in part["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"]
    assert parts[-1]["finish_reason"] == whole["finish_reason"]


def test_sampling_has_the_defaults_of_vllm(frontend: FrontendProcess) -> None:
    frontend.post(PATH, token_ids=PROMPT, sampling_params={"stop_token_ids": [PROMPT[0]]})
    [request] = [m for m in frontend.core.received if hasattr(m, "requests")][-1].requests
    params = request.sampling_params
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
    assert (params.min_p, params.repetition_penalty) == (0.0, 1.0)
    context = frontend.config.model.max_model_len
    assert params.max_tokens == context - len(PROMPT)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, -1]}, "token_ids[1]"),
        ({"token_ids": [1] * 4000}, "token_ids"),
        ({"sampling_params": {"stop": "a", "detokenize": False}}, "sampling_params.stop"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"min_tokens": 9999}}, "sampling_params.min_tokens"),
        ({"sampling_params": {"extra_args": {"a": 1}}}, "sampling_params.extra_args"),
        ({"sampling_params": {"prompt_logprob_token_ids": [[1]]}}, CANDIDATES),
        ({"sampling_params": {"prompt_logprob_token_ids": []}}, CANDIDATES),
        ({"sampling_params": {"prompt_logprob_token_ids": [1] * 21}}, CANDIDATES),
        ({"sampling_params": {"prompt_logprob_token_ids": [2**40]}}, CANDIDATES),
        ({"sampling_params": {"prompt_logprob_token_ids": [1, [2]]}}, CANDIDATES),
        ({"sampling_params": {"prompt_logprob_token_ids": [1]}, "stream": True}, CANDIDATES),
        (
            {"sampling_params": {"prompt_logprob_token_ids": [1], "prompt_logprob_start": 99}},
            "sampling_params.prompt_logprob_start",
        ),
        ({"output_mode": "audio"}, "output_mode"),
        ({"output_mode": "derender", "stream": True}, "stream"),
        (
            {"output_mode": "text", "sampling_params": {"detokenize": False}},
            "sampling_params.detokenize",
        ),
        ({"features": {"mm_hashes": {}}}, "features"),
    ],
)
def test_errors_name_the_field(frontend: FrontendProcess, fields: dict, param: str) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}} | fields
    response = frontend.post(PATH, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("num_top", [None, 2])
def test_candidates_for_each_token_of_a_prompt_are_scored(
    frontend: FrontendProcess, start: int, num_top: int | None
) -> None:
    rows = [[7 + i, 3, *([5] * (i % 2))] for i in range(len(PROMPT) - 1 - start)]
    for given in (rows, [4, 6]):
        fields = {"prompt_logprob_token_ids": given, "prompt_logprob_start": start}
        params = fields | {"max_tokens": 1, "prompt_logprobs": num_top}
        answer = frontend.post(PATH, token_ids=PROMPT, sampling_params=params).json()
        scores = np.load(io.BytesIO(base64.b64decode(answer["prompt_token_id_logprobs"])))
        wanted = given if given is rows else [given] * len(rows)
        longest = max(map(len, wanted))
        expected = [
            [-token / 1000 for token in row] + [-np.inf] * (longest - len(row)) for row in wanted
        ]
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, expected, rtol=1e-6)
        plain = frontend.post(
            PATH, token_ids=PROMPT, sampling_params={"max_tokens": 1, "prompt_logprobs": num_top}
        ).json()
        assert answer.get("prompt_logprobs") == plain.get("prompt_logprobs")


def test_requests_are_aborted_by_their_ids(slow_frontend: FrontendProcess) -> None:
    path = "/inference/v1/abort_requests"
    params = {"max_tokens": 490, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": params, "request_id": "mine"}
    short = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    assert slow_frontend.post(PATH, **short | {"request_id": "mine"}).json()["request_id"] == "mine"
    answer = slow_frontend.post(PATH, **short)
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(slow_frontend.post, PATH, **body)
        while slow_frontend.post(path, request_ids=["other", "mine"]).json() == {"aborted": 0}:
            assert not future.done()
        [choice] = future.result().json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert slow_frontend.post(path, request_ids=[]).json()["error"]["param"] == "request_ids"


def test_a_rendered_request_can_be_generated(frontend: FrontendProcess) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 4,
        "temperature": 0,
        "seed": 5,
        "stop": ["x"],
        "logit_bias": {"7": 2},
        "cache_salt": "mine",
        "response_format": {"type": "json_object"},
    }
    messages = [{"role": "user", "content": "Say it"}]
    rendered = frontend.post("/v1/chat/completions/render", messages=messages, **fields).json()
    assert rendered["request_id"].startswith("chatcmpl-") and rendered["features"] is None
    assert rendered["cache_salt"] == "mine" and rendered["stream"] is False
    assert rendered["sampling_params"] == {
        "max_tokens": 4,
        "temperature": 0.0,
        "seed": 5,
        "stop": ["x"],
        "logit_bias": {"7": 2.0},
        "structured_outputs": {"json_object": True},
    }
    chat = frontend.post(
        "/v1/chat/completions", messages=messages, return_token_ids=True, **fields
    ).json()
    assert rendered["token_ids"] == chat["prompt_token_ids"]
    answer = frontend.post(PATH, **rendered).json()
    assert answer["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]

    prompts = ["One two", "Three"]
    lists = frontend.post("/v1/completions/render", prompt=prompts, max_tokens=3).json()
    assert [each["sampling_params"]["max_tokens"] for each in lists] == [3, 3]
    assert len({each["request_id"] for each in lists}) == 2
    for each, prompt in zip(lists, prompts, strict=True):
        assert each["token_ids"] == frontend.post("/tokenize", prompt=prompt).json()["tokens"]
    [given] = frontend.post("/v1/completions/render", prompt=PROMPT).json()
    assert given["token_ids"] == PROMPT


def test_a_request_that_cannot_be_rendered_is_refused(frontend: FrontendProcess) -> None:
    for path, fields, param in (
        ("/v1/completions/render", {"prompt": "One", "use_beam_search": True}, "use_beam_search"),
        ("/v1/chat/completions/render", {"messages": [], "temperature": -1}, "temperature"),
        ("/v1/completions/render", {"prompt": []}, "prompt"),
    ):
        response = frontend.post(path, **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_chat_has_the_tokens_that_a_router_forwards(frontend: FrontendProcess) -> None:
    """Routers of vLLM send them with the messages, to the server that continues a prefill."""

    def ask(ids: Any, path: str = "/v1/chat/completions", **fields: Any) -> Any:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        body |= {"return_token_ids": True, "kv_transfer_params": {"prompt_token_ids": ids}}
        return frontend.post(path, **body | fields).json()

    assert ask(PROMPT)["prompt_token_ids"] == PROMPT
    # These need the messages.
    rendered = ask(None)["prompt_token_ids"]
    assert rendered != PROMPT and ask(PROMPT, echo=True)["prompt_token_ids"] == rendered
    name = "kv_transfer_params.prompt_token_ids"
    for ids, problem in (("x", "an array"), ([10**9], "token id"), (["a"], "token id")):
        error = ask(ids)["error"]
        assert error["param"].startswith(name) and problem in error["message"], error
    many = [[{"role": "user", "content": "Hi"}]]
    error = ask(PROMPT, "/v1/chat/completions/batch", messages=many)["error"]
    assert error["param"] == name and "batches" in error["message"]
