"""SGLang's own API. The core repeats the prompt."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.servers.echo_core import NUM_BLOCKS
from support.servers.frontend_process import FrontendProcess

pytestmark = pytest.mark.slow

TEXT = "The sky is\nblue"


def generate(frontend: FrontendProcess, *, sampling: dict | None = None, **fields: Any) -> Any:
    response = frontend.post("/generate", sampling_params=sampling or {}, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def token_ids(frontend: FrontendProcess, text: str) -> list[int]:
    return list(frontend.tokenizer.encode(text))


def test_answer_has_its_tokens_and_says_why_it_ended(frontend: FrontendProcess) -> None:
    ids = token_ids(frontend, TEXT)
    answer = generate(frontend, text=TEXT, sampling={"max_new_tokens": len(ids)}, rid="mine")
    assert (answer["text"], answer["output_ids"]) == (TEXT, ids)
    meta = answer["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == (
        "mine",
        *[len(ids)] * 2,
    )
    assert meta["finish_reason"] == {"type": "length", "length": len(ids)}
    assert meta["e2e_latency"] > 0

    stopped = generate(frontend, input_ids=ids, sampling={"stop": [" is"]})
    assert stopped["text"] == "The sky"
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": " is"}
    # The default limit is SGLang's.
    assert len(generate(frontend, text=TEXT, sampling={"ignore_eos": True})["output_ids"]) == 128
    # Settings of images have no effect on a prompt without them.
    settings = {"mm_processor_kwargs": {"max_pixels": 9}, "max_dynamic_patch": 2}
    settings |= {"images_config": {"max_pixels": 9}, "use_audio_in_video": False}
    settings |= {"image_data": [], "video_data": None, "mm_hashes": ["ab"]}
    limit = {"max_new_tokens": len(ids)}
    assert generate(frontend, text=TEXT, sampling=limit, **settings)["text"] == TEXT


def test_lists_of_prompts_get_lists_of_answers(frontend: FrontendProcess) -> None:
    texts = ["Hello", " blue"]
    both = generate(frontend, text=texts, sampling={"max_new_tokens": 1, "n": 2}, rid=["a", "b"])
    assert [each["text"] for each in both] == ["Hello", "Hello", " blue", " blue"]
    assert [each["meta_info"]["id"] for each in both] == ["a", "a_1", "b", "b_1"]
    assert len(generate(frontend, text=texts[:1], sampling={"max_new_tokens": 1})) == 1
    ids = [token_ids(frontend, text) for text in texts]
    lists = generate(frontend, input_ids=ids, sampling={"max_new_tokens": 1})
    assert [each["output_ids"] for each in lists] == ids


def test_each_prompt_of_a_list_has_its_own_parameters(frontend: FrontendProcess) -> None:
    texts = ["The sky", "The sea is"]
    first, second = generate(
        frontend,
        text=texts,
        sampling=[{"max_new_tokens": 1}, {"max_new_tokens": 2, "stop": " sea"}],
        return_logprob=[True, False],
        logprob_start_len=[1, -1],
        top_logprobs_num=[2, 0],
        token_ids_logprob=[[7], []],
        rid=["a", "b"],
    )
    assert [each["text"] for each in (first, second)] == ["The", "The"]
    assert [each["meta_info"]["id"] for each in (first, second)] == ["a", "b"]
    meta = first["meta_info"]
    assert [len(meta["input_token_logprobs"]), len(meta["output_top_logprobs"][0])] == [1, 2]
    assert meta["output_token_ids_logprobs"][0][0][1] == 7
    assert second["meta_info"]["finish_reason"] == {"type": "stop", "matched": " sea"}
    assert "output_token_logprobs" not in second["meta_info"]
    # The values of one prompt are those of all its outputs, and equal values are no list.
    sampling = [{"max_new_tokens": 1, "n": 2}, {"max_new_tokens": 2, "n": 2}]
    several = generate(frontend, text=texts, sampling=sampling, extra_key=["x", "x"])
    assert [len(each["output_ids"]) for each in several] == [1, 1, 2, 2]


def test_listed_tokens_have_logprobs(frontend: FrontendProcess) -> None:
    ids = token_ids(frontend, TEXT)
    wanted = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [7, 5]}
    meta = generate(frontend, text=TEXT, sampling={"max_new_tokens": 3}, **wanted)["meta_info"]
    assert [[e[1] for e in each] for each in meta["output_token_ids_logprobs"]] == [[7, 5]] * 3
    assert [[e[1] for e in each] for each in meta["output_top_logprobs"]] == [[0, 1]] * 3
    assert "input_token_ids_logprobs" not in meta

    # No new token: the listed tokens are scored after the prompt.
    wanted |= {"top_logprobs_num": 0, "logprob_start_len": 0, "token_ids_logprob": [[7], [7]]}
    texts = [TEXT, TEXT]
    for each in generate(frontend, text=texts, sampling={"max_new_tokens": 0}, **wanted):
        meta = each["meta_info"]
        [[(logprob, token, text)]] = meta["output_token_ids_logprobs"]
        assert (token, text, meta["output_token_logprobs"]) == (7, None, [])
        assert meta["input_token_ids_logprobs"] == [None] + [[[logprob, 7, None]]] * (len(ids) - 1)


def test_logprobs_of_a_stream_grow(frontend: FrontendProcess) -> None:
    body = {"text": TEXT, "sampling_params": {"max_new_tokens": 4}, "stream": True}
    body |= {"return_logprob": True, "top_logprobs_num": 1, "token_ids_logprob": [9]}
    body["logprob_start_len"] = 2
    *lines, _ = frontend.post("/generate", **body).text.split("\n\n")[:-1]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    for event in events:
        meta = event["meta_info"]
        assert [each[1] for each in meta["input_token_logprobs"]] == token_ids(frontend, TEXT)[2:]
        assert [each[1] for each in meta["output_token_logprobs"]] == event["output_ids"]
        for name in ("top", "token_ids"):
            assert len(meta[f"output_{name}_logprobs"]) == len(event["output_ids"])
    body["stream"] = False
    whole = frontend.post("/generate", **body).json()["meta_info"]
    for name in ("token", "top", "token_ids"):
        for field in (f"input_{name}_logprobs", f"output_{name}_logprobs"):
            assert events[-1]["meta_info"][field] == whole[field]
    body |= {"stream": True, "sampling_params": {"max_new_tokens": 400}}
    body["token_ids_logprob"] = list(range(90))
    assert "at most 32768" in frontend.post("/generate", **body).json()["error"]["message"]


def test_each_event_of_a_stream_has_all_output_so_far(frontend: FrontendProcess) -> None:
    ids = token_ids(frontend, TEXT)
    body = {"text": TEXT, "sampling_params": {"max_new_tokens": len(ids)}, "stream": True}
    *lines, done = frontend.post("/generate", **body).text.split("\n\n")[:-1]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert done == "data: [DONE]"
    for event in events:
        assert ids[: len(event["output_ids"])] == event["output_ids"]
        assert TEXT.startswith(event["text"])
    assert all(event["meta_info"]["finish_reason"] is None for event in events[:-1])
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": len(ids)}
    assert (events[-1]["text"], events[-1]["output_ids"]) == (TEXT, ids)


def test_logprobs_of_answer_and_prompt(frontend: FrontendProcess) -> None:
    ids = token_ids(frontend, TEXT)
    wanted = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    meta = generate(frontend, text=TEXT, sampling={"max_new_tokens": 2}, **wanted)["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == ids[:2]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2]
    assert "input_token_logprobs" not in meta

    wanted["logprob_start_len"] = 1
    scored = generate(frontend, text=TEXT, sampling={"max_new_tokens": 0}, **wanted)
    assert (scored["text"], scored["output_ids"]) == ("", [])
    meta = scored["meta_info"]
    entries = meta["input_token_logprobs"]
    assert [entry[1] for entry in entries] == ids[1:]
    assert "".join(entry[2] for entry in entries) == TEXT.removeprefix("The")
    assert [entry[0] is None for entry in entries] == [True] + [False] * (len(ids) - 2)
    assert meta["input_top_logprobs"][0] is None and len(meta["input_top_logprobs"][1]) == 2
    assert meta["output_token_logprobs"] == []


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/generate", {"text": TEXT, "sampling_params": {"max_new_tokens": 490}}, 200),
        (
            "/generate",
            {"text": TEXT, "sampling_params": {"max_new_tokens": 490}, "stream": True},
            200,
        ),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 490}, 200),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}, 200),
        ("/v1/messages", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 490}, 500),
    ],
)
def test_aborted_requests_return_what_they_have(
    slow_frontend: FrontendProcess, path: str, body: dict, status: int
) -> None:
    frontend = slow_frontend
    is_known = path != "/v1/messages"
    body = body | {"ignore_eos": True, "max_tokens": 490} if path.startswith("/v1") else dict(body)
    with ThreadPoolExecutor(1) as pool:
        chosen = {"rid": "mine"} if is_known else {}
        future = pool.submit(frontend.post, path, **body, **chosen)
        abort = {"rid": "mine"} if is_known else {"abort_all": True}
        while frontend.post("/abort_request", **abort).json() == {"aborted": 0}:
            assert not future.done()
        answer = future.result()
    assert answer.status_code == status, answer.text
    if status == 200:
        assert '"abort"' in answer.text
        assert answer.headers["x-request-id"] == "mine"


def test_one_prompt_of_a_list_is_aborted(slow_frontend: FrontendProcess) -> None:
    sampling = {"ignore_eos": True, "max_new_tokens": 400}
    body = {"text": ["a", "b"], "rid": ["mine", "yours"], "sampling_params": sampling}
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(slow_frontend.post, "/generate", **body)
        for rid in ("yours", "mine"):
            while (count := slow_frontend.post("/abort_request", rid=rid).json()["aborted"]) == 0:
                assert not future.done()
            assert count == 1
        reasons = [each["meta_info"]["finish_reason"]["type"] for each in future.result().json()]
    assert reasons == ["abort", "abort"]


@pytest.mark.parametrize(
    ("text", "answer", "matched"),
    [
        ("A taxi has 4x9", "A taxi has 4x", "[0-9]x"),
        ("The sky was blue 4x", "The sky was ", "blue"),
        ("The sky is blue", "The sky is", "is"),
        ("One! Two", "One!", r"[.!?]\s*$"),
    ],
)
def test_a_match_of_an_expression_ends_the_text(
    frontend: FrontendProcess, text: str, answer: str, matched: str
) -> None:
    sampling = {"max_new_tokens": 16, "stop_regex": ["[0-9]x", "is", r"[.!?]\s*$"], "stop": "blue"}
    result = generate(frontend, text=text, sampling=sampling)
    assert result["text"] == answer
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}


def test_abort_needs_an_id(frontend: FrontendProcess) -> None:
    assert frontend.post("/abort_request", rid="unknown").json() == {"aborted": 0}
    assert frontend.post("/abort_request").json()["error"]["param"] == "rid"


def test_clients_choose_ids_and_replicas(frontend: FrontendProcess) -> None:
    numbered = generate(frontend, text=["a", "b"], sampling={"max_new_tokens": 1}, rid="mine")
    assert [each["meta_info"]["id"] for each in numbered] == ["mine_0", "mine_1"]
    shown = generate(frontend, text=TEXT, return_prompt_token_ids=True, routed_dp_rank=0)
    assert shown["prompt_token_ids"] == token_ids(frontend, TEXT)
    for name in ("rid", "request_id"):
        chosen = frontend.post("/v1/completions", prompt="a", max_tokens=1, **{name: "mine"})
        assert chosen.headers["x-request-id"] == "mine"
        assert chosen.json()["id"] == "cmpl-mine"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": None}, "text"),
        ({"text": "a", "input_ids": [1]}, "input_ids"),
        ({"text": ["a", 3]}, "text[1]"),
        ({"text": [], "top_logprobs_num": []}, "text"),
        ({"image_data": [[[["x"]]]]}, "image_data[0][0]"),
        ({"text": None, "input_ids": [1, 10_000_000]}, "input_ids[1]"),
        ({"rid": ["a", "b"]}, "rid"),
        ({"text": ["x", "y"], "rid": ["a", "b c"]}, "rid[1]"),
        ({"rid": "a b"}, "rid"),
        ({"routed_dp_rank": 1}, "routed_dp_rank"),
        ({"bootstrap_room": 1}, "bootstrap_room"),
        ({"sampling_params": {"beam_width": 2}}, "sampling_params.beam_width"),
        ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": 5000}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"min_new_tokens": -1}}, "sampling_params.min_new_tokens"),
        ({"sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        ({"sampling_params": {"regex": "("}}, "sampling_params.regex"),
        ({"sampling_params": {"stop_regex": "^a"}}, "sampling_params.stop_regex"),
        ({"return_logprob": True, "top_logprobs_num": 1000}, "top_logprobs_num"),
        ({"return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
        ({"return_logprob": True, "token_ids_logprob": [-1]}, "token_ids_logprob"),
        ({"return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
        ({"return_logprob": True, "token_ids_logprob": [1, [2]]}, "token_ids_logprob"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"n": 2}]}, "sampling_params[1].n"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"top_p": 2}]}, "sampling_params[1].top_p"),
        ({"text": ["a", "b"], "top_logprobs_num": [1]}, "top_logprobs_num"),
        ({"text": ["a", "b"], "lora_path": [None, "c"]}, "lora_path[1]"),
        ({"text": None, "input_embeds": [[0.5, 0.5]]}, "input_embeds"),
        ({"text": None, "input_ids": [[1], 2], "rid": ["a", "b"]}, "input_ids[1]"),
        ({"image_data": "x"}, "image_data"),
        ({"audio_data": ["x"]}, "audio_data"),
        ({"video_data": [3]}, "video_data[0]"),
        ({"video_data": [{"url": 3}]}, "video_data[0].url"),
        ({"text": ["a", "b"], "image_data": ["x"]}, "image_data"),
        ({"text": ["a", "b"], "image_data": [None, "x"]}, "image_data[1]"),
        ({"lora_path": "unknown"}, "model"),
    ],
)
def test_errors_name_the_field(frontend: FrontendProcess, fields: dict, param: str) -> None:
    response = frontend.post("/generate", **{"text": "Hi"} | fields)
    expected = 404 if "lora_path" in fields else 400
    assert (response.status_code, response.json()["error"]["param"]) == (expected, param)


@pytest.mark.parametrize(
    ("fields", "matched"),
    [({"stop": [" is"]}, " is"), ({}, 2), ({"ignore_eos": True}, None)],
    ids=["string", "end of sequence", "length"],
)
def test_choices_have_the_matched_stop(
    frontend: FrontendProcess, fields: dict, matched: object
) -> None:
    # The echo of the prompt has the end of a sequence.
    prompt = f"{TEXT}<|im_end|>"
    for path, body in (
        ("/v1/completions", {"prompt": prompt}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]}),
    ):
        body |= {"max_tokens": 9} | fields
        [choice] = frontend.post(path, **body).json()["choices"]
        assert choice["matched_stop"] == matched
        streamed = frontend.post(path, stream=True, **body).text.split("\n\n")
        last = json.loads(streamed[-3].removeprefix("data: "))
        assert last["choices"][0]["matched_stop"] == matched
    answer = generate(frontend, text=prompt, sampling=fields | {"max_new_tokens": 9})
    assert answer["meta_info"]["finish_reason"].get("matched") == matched


def test_openai_answers_have_what_sglang_adds(frontend: FrontendProcess) -> None:
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 3}
    body |= {"return_meta_info": True, "return_cached_tokens_details": True}
    again = frontend.post("/v1/chat/completions", **body, logprobs=True, top_logprobs=2).json()
    meta = again["choices"][0]["meta_info"]
    assert meta["id"] == again["id"]
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert [len(entry) for entry in meta["output_token_logprobs"]] == [3] * 3
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 3
    assert again["sglext"] == {
        "cached_tokens_details": {"device": meta["cached_tokens"], "host": 0}
    }
    stream = {"stream": True, "return_cached_tokens_details": True}
    *_, last, _done = frontend.post("/v1/completions", prompt=TEXT, **stream).text.split("\n\n")[
        :-1
    ]
    chunk = json.loads(last.removeprefix("data: "))
    assert (chunk["choices"], list(chunk["sglext"])) == ([], ["cached_tokens_details"])


def test_lists_are_tokenized(frontend: FrontendProcess) -> None:
    ids = token_ids(frontend, TEXT)
    answer = frontend.post("/v1/tokenize", prompt=[TEXT, "", TEXT]).json()
    assert (answer["tokens"], answer["count"]) == ([ids, [], ids], [len(ids), 0, len(ids)])
    texts = frontend.post("/v1/detokenize", tokens=answer["tokens"]).json()["text"]
    assert texts == [TEXT, "", TEXT]


def test_clients_can_probe_the_server(frontend: FrontendProcess) -> None:
    for prefix in ("/", "/get_"):
        model = frontend.http.get(f"{prefix}model_info").json()
        assert (model["model_path"], model["is_generation"]) == ("echo-model", True)
        assert model["served_model_name"] == "echo"
        server = frontend.http.get(f"{prefix}server_info").json()
        assert (server["served_model_name"], server["context_length"]) == ("echo", 512)
        assert server["max_total_num_tokens"] == NUM_BLOCKS * server["page_size"]
        assert server["internal_states"][0]["num_requests_waiting"] == 0
        vllm = frontend.http.get(f"{prefix}server_info?config_format=json").json()["vllm_config"]
        assert vllm["model_config"]["max_model_len"] == 512
        assert vllm["parallel_config"]["data_parallel_size"] == 1
        assert (vllm["lora_config"], vllm["weight_transfer_config"]) == (None, None)
    for path in ("/weight_version", "/get_weight_version", "/weight_info"):
        assert frontend.http.get(path).json() == {"weight_version": "default"}
    for name in ("step-7", "default"):
        renamed = frontend.post("/update_weight_version", new_version=name)
        assert (renamed.json()["success"], renamed.json()["new_version"]) == (True, name)
        assert frontend.http.get("/weight_version").json() == {"weight_version": name}
        answer = generate(frontend, text=TEXT, sampling={"max_new_tokens": 1})
        assert answer["meta_info"]["weight_version"] == name
    refused = frontend.post("/update_weight_version", abort_all_requests=False)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "new_version")
    [load] = frontend.http.get("/v1/loads").json()["loads"]
    assert (load["dp_rank"], load["max_total_num_tokens"]) == (0, server["max_total_num_tokens"])
    [older] = frontend.http.get("/get_load").json()
    assert (older["dp_rank"], older["num_reqs"]) == (0, load["num_running_reqs"])
    for path in ("/health_generate", "/ready"):
        assert frontend.http.get(path).status_code == 200
    assert frontend.http.post("/flush_cache").json() == {"success": True}
    # Trainers send GET. Any page could make a browser send it.
    assert frontend.http.get("/flush_cache").json() == {"success": True}
    for browser in (
        {"user-agent": "Mozilla/5.0 (X11; Linux x86_64)"},
        {"user-agent": "Lynx/2.9", "sec-fetch-site": "cross-site"},
        {"user-agent": "Lynx/2.9", "origin": "null"},
    ):
        for method in ("GET", "HEAD"):
            answer = frontend.http.request(method, "/flush_cache", headers=browser)
            assert answer.status_code == 403, browser


_CALLS = 'So. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "g"}'


@pytest.mark.parametrize("parser", ["qwen25", "hermes"])
def test_calls_in_a_text_are_found(frontend: FrontendProcess, parser: str) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("e", "f")]
    answer = frontend.post(
        "/parse_function_call", text=_CALLS, tools=tools, tool_call_parser=parser
    ).json()
    f = {"tool_index": 1, "name": "f", "parameters": '{"a": 1}'}
    assert answer == {
        "normal_text": "So.",
        "calls": [f, {"tool_index": -1, "name": "g", "parameters": "{}"}],
    }


def test_reasoning_in_a_text_is_separated(frontend: FrontendProcess) -> None:
    body = {"text": "<think>\nHm.</think>\nYes.", "reasoning_parser": "qwen3"}
    answer = frontend.post("/separate_reasoning", **body, return_blocks=True).json()
    assert (answer["reasoning_text"], answer["text"]) == ("Hm.", "Yes.")
    assert [each["type"] for each in answer["blocks"]] == ["reasoning", "text"]
    implied = body | {"text": "Hm.</think>Yes.", "reasoning_parser": "deepseek-r1"}
    assert frontend.post("/separate_reasoning", **implied).json() == {
        "reasoning_text": "Hm.",
        "text": "Yes.",
    }


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/separate_reasoning", {}, "reasoning_parser"),
        ("/separate_reasoning", {"reasoning_parser": "unknown"}, "reasoning_parser"),
        ("/parse_function_call", {"tool_call_parser": "unknown"}, "tool_call_parser"),
        (
            "/parse_function_call",
            {"tool_call_parser": "hermes", "tools": [{}]},
            "tools[0].function",
        ),
    ],
)
def test_errors_of_parsers_name_the_field(
    frontend: FrontendProcess, path: str, body: dict, param: str
) -> None:
    response = frontend.post(path, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
