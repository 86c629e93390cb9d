"""vLLM's render routes: what they return makes `/inference/v1/generate` generate what the request would have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.requests.chats import TIME, last_params, marked_tokenizer, user
from support.servers.frontend_process import FrontendProcess

pytestmark = pytest.mark.slow

GENERATE = "/inference/v1/generate"
MCP_TOOL = {"type": "mcp", "server_label": "a", "server_url": "http://127.0.0.1:9/mcp"}
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
    answer = post(thinking, GENERATE, **rendered | {"output_mode": "derender"})
    assert last_params(thinking) == expected and answer["output_mode"] == "derender"
    for choice, asked in zip(answer["choices"], chat["choices"], strict=True):
        assert choice["token_ids"] == asked["token_ids"]
        for each in (choice, asked):
            for call in each["message"].get("tool_calls", ()):
                del call["id"]
        assert choice == asked


def test_each_prompt_of_a_completion_is_rendered(frontend: FrontendProcess) -> None:
    body = {"prompt": ["One", "Two three"], "seed": 1, "logprobs": 1, "cache_salt": "a"}
    completion = post(frontend, "/v1/completions", return_token_ids=True, **body)
    rendered = post(frontend, "/v1/completions/render", stream=True, request_id="mine", **body)
    assert [each["token_ids"] for each in rendered] == [
        choice["prompt_token_ids"] for choice in completion["choices"]
    ]
    assert [each["request_id"] for each in rendered] == ["cmpl-mine-0", "cmpl-mine-1"]
    for each, choice in zip(rendered, completion["choices"], strict=True):
        assert each["sampling_params"]["max_tokens"] == 16
        assert (each["cache_salt"], each["priority"], each["stream"]) == ("a", 0, True)
        answer = post(frontend, GENERATE, **each | {"stream": False})
        assert answer["choices"][0]["token_ids"] == choice["token_ids"]


@pytest.mark.parametrize(
    ("path", "prompt", "limit"),
    [
        ("/v1/messages", {"messages": user("When?"), "system": "Be kind."}, "max_tokens"),
        ("/v1/responses", {"input": "When?", "instructions": "Be kind."}, "max_output_tokens"),
    ],
)
def test_other_formats_of_conversations_are_rendered_like_a_chat(
    frontend: FrontendProcess, path: str, prompt: dict[str, Any], limit: str
) -> None:
    messages = [{"role": "system", "content": "Be kind."}, *user("When?")]
    chat = post(frontend, "/v1/chat/completions/render", messages=messages, max_tokens=3)
    rendered = post(frontend, f"{path}/render", **prompt, **{limit: 3})
    assert rendered["token_ids"] == chat["token_ids"]
    assert rendered["sampling_params"] == chat["sampling_params"]
    assert rendered["request_id"].startswith("resp_" if "responses" in path else "chatcmpl-")


def test_rendered_tokens_have_their_places_in_the_text(frontend: FrontendProcess) -> None:
    text = "Grüße 😀, One two"
    [rendered] = post(frontend, "/v1/completions/render", prompt=text, return_token_offsets=True)
    places = rendered["token_offsets"]
    assert len(places) == len(rendered["token_ids"])
    assert (places[0][0], places[-1][1]) == (0, len(text))
    assert text[slice(*places[-1])] == " two"
    for side, kept in (("left", places[-2:]), ("right", places[:2])):
        cut = {"truncate_prompt_tokens": 2, "truncation_side": side}
        [short] = post(
            frontend, "/v1/completions/render", prompt=text, return_token_offsets=True, **cut
        )
        assert short["token_offsets"] == kept
    chat = post(
        frontend, "/v1/chat/completions/render", messages=user(text), return_token_offsets=True
    )
    assert len(chat["token_offsets"]) == len(chat["token_ids"])
    [ids] = post(frontend, "/v1/completions/render", prompt=[5, 6], return_token_offsets=True)
    assert ids["token_offsets"] is None


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/responses/render", {"input": 5}, "input"),
        ("/v1/responses/render", {"input": "a", "tools": [MCP_TOOL]}, "tools"),
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


ASKED = {"messages": [{"role": "user", "content": "a"}]}


def generated(token_ids: list[int], **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "token_ids": token_ids, "finish_reason": "stop"} | fields
    return {"request_id": "r", "choices": [choice], "kv_transfer_params": {"a": 1}}


def test_derendered_chat_is_the_answer_of_the_request(thinking: FrontendProcess) -> None:
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    text = f"<think>\nLet me see.\n</think>\n\nIt is late.{call}"
    ids = thinking.tokenizer.encode(text, False)
    request = {"messages": user("When?"), "tools": [TIME], "max_tokens": len(ids)}
    request["return_token_ids"] = True
    answer = post(
        thinking,
        "/v1/chat/completions/derender",
        generate_response=generated(
            ids,
            logprobs={
                "content": [
                    {
                        "token": f"token_id:{ids[0]}",
                        "logprob": -1.0,
                        "top_logprobs": [{"token_id": ids[1], "logprob": -2.0}],
                    }
                ]
            },
        )
        | {"prompt_token_ids": [5, 6]},
        chat_request=request,
        prompt_tokens=10,
    )
    assert answer["prompt_token_ids"] == [5, 6]
    # The echo core generates the prompt.
    params = {"max_tokens": len(ids), "skip_special_tokens": False}
    fields = {"token_ids": ids, "sampling_params": params, "output_mode": "derender"}
    context = {"tools": [TIME], "tool_choice": "auto", "history_tool_call_cnt": 0}
    inline = post(thinking, GENERATE, parse_context=context, **fields)
    [choice] = answer["choices"]
    for name in ("reasoning", "content"):
        assert inline["choices"][0]["message"][name] == choice["message"][name]
    hidden = post(thinking, GENERATE, parse_context={"include_reasoning": False}, **fields)
    assert hidden["choices"][0]["token_ids"] is None
    assert "It is late.<tool_call>" in hidden["choices"][0]["message"]["content"]
    for wrong in ({"parse_context": {"no": 1}}, {}, {"parse_context": {"tool_choice": "auto"}}):
        refused = thinking.post(GENERATE, **fields | wrong)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith("parse_context")
    message = choice["message"]
    assert message["reasoning"].strip() == "Let me see."
    assert message["content"].strip() == "It is late."
    assert [each["function"]["name"] for each in message["tool_calls"]] == ["get_time"]
    assert (choice["finish_reason"], answer["id"]) == ("tool_calls", "r")
    assert answer["usage"]["total_tokens"] == 10 + len(ids)
    assert answer["kv_transfer_params"] == {"a": 1}
    [entry] = choice["logprobs"]["content"]
    first, second = (thinking.tokenizer.decode([each]) for each in ids[:2])
    assert (entry["token"], entry["top_logprobs"][0]["token"]) == (first, second)


@pytest.mark.parametrize("size", [1, 7])
def test_chunks_are_derendered_one_by_one(thinking: FrontendProcess, size: int) -> None:
    call = '<tool_call>\n{"name": "get_time", "arguments": {"x": "東"}}\n</tool_call>'
    ids = thinking.tokenizer.encode(f"<think>\nHm 京.\n</think>\n\nIt is 東京.{call}", False)
    request = {"messages": user("When?"), "tools": [TIME], "max_tokens": len(ids)}
    chat: dict[str, Any] = {"role": "", "reasoning": "", "content": "", "arguments": ""}
    text, names, states = "", [], [None, None]
    chunks = [{"token_ids": ids[at : at + size]} for at in range(0, len(ids), size)]
    chunks.append({"token_ids": [], "finish_reason": "stop"})
    for chunk in chunks:
        fields = {"generate_chunk": {"request_id": "r", "choices": [{"index": 0} | chunk]}}
        fields |= {"stream": True}
        path = "/v1/chat/completions/derender"
        answer = post(thinking, path, chat_request=request, stream_state=states[0], **fields)
        states[0] = answer["stream_state"]
        [choice] = answer["chunk"]["choices"]
        for name in ("role", "reasoning", "content"):
            chat[name] += choice["delta"].get(name) or ""
        for piece in choice["delta"].get("tool_calls", ()):
            names += filter(None, [piece["function"].get("name")])
            chat["arguments"] += piece["function"]["arguments"]
        answer = post(thinking, "/v1/completions/derender", stream_state=states[1], **fields)
        states[1] = answer["stream_state"]
        text += answer["chunk"]["choices"][0]["text"]
    assert (choice["finish_reason"], answer["chunk"]["id"]) == ("tool_calls", "r")
    assert chat == {
        "role": "assistant",
        "reasoning": "Hm 京.",
        "content": "It is 東京.",
        "arguments": '{"x": "東"}',
    }
    assert names == ["get_time"] and text == thinking.tokenizer.decode(ids, True)


def test_derendered_completions_have_their_texts(thinking: FrontendProcess) -> None:
    prompts = ["One two", "Three"]
    ids = [thinking.tokenizer.encode(f" {text} stop here", False) for text in prompts]
    responses = [
        generated(ids[0], stop_reason=" stop"),
        generated(ids[1], finish_reason="length"),
    ]
    answer = post(
        thinking,
        "/v1/completions/derender",
        generate_responses=responses,
        prompt_tokens=[3, 4],
        prompt_token_ids=[[5, 6], [7]],
    )
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [" One two", " Three stop here"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["total_tokens"] == 7 + len(ids[0]) + len(ids[1])


@pytest.mark.parametrize(
    ("path", "fields", "problem"),
    [
        ("chat/completions", {}, "generate_response is required"),
        ("chat/completions", {"generate_response": generated([])}, "token_ids must have"),
        ("chat/completions", {"generate_response": generated([-1])}, "token_ids[0] is out of"),
        ("chat/completions", {"generate_response": generated([5] * 5000)}, "max_model_len"),
        (
            "chat/completions",
            {"generate_response": generated([5]), "prompt_token_ids": [5] * 5000},
            "prompt_token_ids must be at most",
        ),
        (
            "chat/completions",
            {"generate_response": generated([5]), "chat_request": {"tools": 5}},
            "chat_request.tools must be",
        ),
        ("completions", {"generate_responses": []}, "generate_responses is required"),
        ("completions", {"stream": True}, "generate_chunk is required"),
        (
            "completions",
            {"stream": True, "generate_chunk": {"choices": [{}, {}]}},
            "at most one choice",
        ),
        (
            "chat/completions",
            {"stream": True, "generate_chunk": {}, "chat_request": {"stop": "a", **ASKED}},
            "chat_request.stop cannot be removed",
        ),
        (
            "completions",
            {
                "stream": True,
                "generate_chunk": generated([5]),
                "stream_state": {"output_token_ids": [-1]},
            },
            "stream_state.output_token_ids[0] is out of",
        ),
        (
            "completions",
            {"generate_responses": [generated([5])], "prompt_tokens": [1, 2]},
            "prompt_tokens must have one entry",
        ),
    ],
)
def test_derender_errors_name_the_field(
    thinking: FrontendProcess, path: str, fields: dict[str, Any], problem: str
) -> None:
    refused = thinking.post(f"/v1/{path}/derender", **fields)
    assert refused.status_code == 400
    assert problem in refused.json()["error"]["message"]
