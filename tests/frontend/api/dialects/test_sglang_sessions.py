"""SGLang's sessions. The core repeats the prompt."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.servers.frontend_process import FrontendProcess

pytestmark = pytest.mark.slow


def generate(frontend: FrontendProcess, **fields: Any) -> Any:
    response = frontend.post("/generate", **fields)
    assert response.status_code == 200, response.text
    return response.json()


def token_ids(frontend: FrontendProcess, text: str) -> list[int]:
    return list(frontend.tokenizer.encode(text))


def test_requests_of_a_session_continue_earlier_ones(frontend: FrontendProcess) -> None:
    assert frontend.post("/open_session", session_id="s", capacity_of_str_len=99).json() == "s"

    def ask(text: str, own: str, **params: Any) -> str:
        found = generate(
            frontend,
            text=text,
            rid=own,
            session_params={"id": "s", **params},
            sampling_params={"max_new_tokens": 99, "stop_token_ids": [0]},
            return_prompt_token_ids=True,
        )
        return frontend.tokenizer.decode(found["prompt_token_ids"], skip_special_tokens=False)

    def kept(prompt: str) -> str:
        """Return the tokens of a prompt and of its answer, which repeats it."""
        answer = generate(frontend, text=prompt, sampling_params={"max_new_tokens": 99})
        return prompt + frontend.tokenizer.decode(answer["output_ids"], skip_special_tokens=False)

    assert ask("One", "a") == "One"
    first = kept("One")
    assert ask(" two", "b", rid="a") == first + " two"
    assert ask(" three", "c", rid="a", drop_previous_output=True) == "One three"
    assert ask(" four", "d", rid="a", offset=1) == "One four"
    assert ask(" six", "e", rid="b").startswith(first + " two")
    # A request that replaces those after an earlier one deletes them, and those that continue them.
    assert ask(" seven", "g", rid="a", replace=True) == first + " seven"
    for rid in ("b", "c", "e"):
        params = {"id": "s", "rid": rid}
        assert frontend.post("/generate", text="x", session_params=params).status_code == 400
    assert ask(" eight", "h", rid="g").startswith(first + " seven")
    assert ask("New", "f", replace=True) == "New"
    for rid in ("a", "none"):
        params = {"id": "s", "rid": rid}
        refused = frontend.post("/generate", text="x", session_params=params)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "session_params.rid"
    assert frontend.post("/open_session", session_id="s").status_code == 400
    assert frontend.post("/close_session", session_id="s").status_code == 200
    refused = frontend.post("/generate", text="x", session_params={"id": "s"})
    assert refused.json()["error"]["param"] == "session_params.id"


def test_sessions_with_similar_ids_have_different_requests(frontend: FrontendProcess) -> None:
    for session_id in ("s", "s/a"):
        assert frontend.post("/open_session", session_id=session_id).status_code == 200
    generate(frontend, text="One", rid="a/b", session_params={"id": "s"})
    params = {"id": "s/a", "rid": "b"}
    refused = frontend.post("/generate", text="x", session_params=params)
    assert refused.json()["error"]["param"] == "session_params.rid"


def test_requests_of_a_streaming_session_follow_each_other(frontend: FrontendProcess) -> None:
    session = frontend.post("/open_session", streaming=True).json()
    prompts: list[list[int]] = []
    rid = None
    for text in ("One", " two", " three"):
        response = frontend.post(
            "/generate",
            text=text,
            stream=True,
            # SGLang's clients name the request before, which is the one that is continued anyway.
            session_params={"id": session, "rid": rid},
            sampling_params={"max_new_tokens": 1},
            return_prompt_token_ids=True,
        )
        lines = response.text.split("\n\n")[:-2]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        ids = token_ids(frontend, text)
        assert events[-1]["prompt_token_ids"] == [*(prompts[-1] if prompts else []), *ids]
        prompts.append([*events[-1]["prompt_token_ids"], *events[-1]["output_ids"]])
        rid = events[-1]["meta_info"]["id"]
    refused = frontend.post("/generate", text="x", session_params={"id": session, "offset": 1})
    assert refused.json()["error"]["param"] == "session_params.offset"


@pytest.mark.parametrize("stream", [False, True])
def test_a_streaming_session_goes_back_before_an_aborted_request(
    slow_frontend: FrontendProcess, stream: bool
) -> None:
    frontend = slow_frontend
    session = {"id": frontend.post("/open_session", streaming=True).json()}
    short = {"session_params": session, "sampling_params": {"max_new_tokens": 1}}
    first = generate(frontend, text="One", **short)
    with ThreadPoolExecutor(1) as pool:
        sampling = {"ignore_eos": True, "max_new_tokens": 400}
        body = {"session_params": session, "sampling_params": sampling, "stream": stream}
        future = pool.submit(frontend.post, "/generate", text=" two", rid="mine", **body)
        while frontend.post("/abort_request", rid="mine").json() == {"aborted": 0}:
            assert not future.done()
        assert '"abort"' in future.result().text
    third = generate(frontend, text=" three", return_prompt_token_ids=True, **short)
    kept = [*token_ids(frontend, "One"), *first["output_ids"]]
    assert third["prompt_token_ids"] == [*kept, *token_ids(frontend, " three")]
