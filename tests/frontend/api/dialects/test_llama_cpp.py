"""llama.cpp's own API. The core repeats the prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine.protocol.arrays import int32_view
from support.servers.frontend_process import FrontendProcess

pytestmark = pytest.mark.slow

TEXT = "The sky is\nblue"


def complete(frontend: FrontendProcess, prompt: Any, **fields: Any) -> Any:
    response = frontend.post("/completion", prompt=prompt, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(frontend: FrontendProcess, **fields: Any) -> list[dict]:
    response = frontend.post("/completion", stream=True, **fields)
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n\n") if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def token_ids(frontend: FrontendProcess, text: str) -> list[int]:
    return list(frontend.tokenizer.encode(text))


def test_completion_counts_its_tokens_and_says_why_it_ended(frontend: FrontendProcess) -> None:
    ids = token_ids(frontend, TEXT)
    answer = complete(
        frontend,
        TEXT,
        n_predict=len(ids),
        return_tokens=True,
        temperature=-1,
        logit_bias=[[7, -1.5]],
    )
    assert (answer["content"], answer["tokens"]) == (TEXT, ids)
    assert (answer["stop"], answer["stop_type"], answer["truncated"]) == (True, "limit", False)
    assert answer["tokens_predicted"] == answer["tokens_evaluated"] == len(ids)
    assert (answer["prompt"], answer["has_new_line"]) == (TEXT, True)
    settings = answer["generation_settings"]
    assert (settings["n_predict"], settings["temperature"]) == (len(ids), 0.0)
    assert settings["logit_bias"] == [{"token": 7, "bias": -1.5}]
    timings = answer["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == timings["predicted_n"] == len(ids)

    stopped = complete(frontend, TEXT, n_predict=len(ids), stop=["", " is"])
    assert (stopped["content"], stopped["tokens"]) == ("The sky", [])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", " is")

    computed = complete(frontend, TEXT, n_predict=0, samplers=[])
    assert (computed["content"], computed["tokens_predicted"]) == ("", 0)
    # Without a limit, and with one that is too high, the answer ends with the context.
    for n_predict in (None, -1, 10_000):
        full = complete(frontend, TEXT, n_predict=n_predict, ignore_eos=True)
        assert full["tokens_evaluated"] + full["tokens_predicted"] == 512
        assert (full["stop_type"], full["truncated"]) == ("limit", True)


def test_the_answer_to_an_empty_prompt_is_empty(frontend: FrontendProcess) -> None:
    empty, other = complete(frontend, ["", "a"], n_predict=3, n_probs=2)
    assert (empty["content"], empty["prompt"], empty["stop_type"]) == ("", "", "none")
    assert empty["tokens_evaluated"] == empty["tokens_predicted"] == 0
    assert (other["prompt"], other["stop_type"]) != ("", "none")
    [event] = events(frontend, prompt="")
    assert (event["content"], event["stop"]) == ("", True)


def test_completion_answers_every_kind_of_prompt(frontend: FrontendProcess) -> None:
    ids = token_ids(frontend, " blue")
    mixed = [*token_ids(frontend, "The sky is"), " blue"]
    whole = complete(frontend, mixed, n_predict=len(mixed))
    assert whole["content"] == whole["prompt"] == "The sky is blue"
    prompts = [ids, " blue", {"prompt_string": " blue"}]
    answers = complete(frontend, prompts, n_predict=len(ids))
    assert [(a["index"], a["content"]) for a in answers] == [(i, " blue") for i in range(3)]
    assert len(complete(frontend, [" blue"], n_predict=1)) == 1
    assert len(complete(frontend, " blue", n_predict=1, n_cmpl=2)) == 2


def test_stream_has_the_tokens_of_each_chunk_and_ends_with_the_result(
    frontend: FrontendProcess,
) -> None:
    ids = token_ids(frontend, TEXT)
    *parts, last = events(frontend, prompt=TEXT, n_predict=len(ids), timings_per_token=True)
    assert all(not part["stop"] and part["timings"]["predicted_n"] for part in parts)
    assert "".join(part["content"] for part in parts) == TEXT
    assert [token for part in parts for token in part["tokens"]] == ids
    assert (last["stop"], last["content"], last["tokens_predicted"]) == (True, "", len(ids))
    assert last["has_new_line"] and last["stop_type"] == "limit"
    both = events(frontend, prompt=["a b c", "d e f"], n_predict=3)
    assert sorted(each["index"] for each in both if each["stop"]) == [0, 1]


def test_response_fields_select_and_flatten(frontend: FrontendProcess) -> None:
    wanted = ["content", "timings/prompt_n", "generation_settings/n_predict", "stop/x", "unknown"]
    answer = complete(frontend, "Hello", n_predict=1, response_fields=wanted)
    assert answer == {
        "content": "Hello",
        "timings/prompt_n": answer["timings/prompt_n"],
        "generation_settings/n_predict": 1,
    }
    assert complete(frontend, "Hello", n_predict=0, response_fields=[""]) == {}


def test_answers_of_openai_routes_have_timings_on_demand(frontend: FrontendProcess) -> None:
    bodies = {
        "/v1/completions": {"prompt": "a b c", "max_tokens": 2},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "a b c"}],
            "max_tokens": 2,
        },
    }
    for path, body in bodies.items():
        whole = frontend.post(path, timings_per_token=True, **body).json()
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        text = frontend.post(path, timings_per_token=True, **streamed, **body).text
        usage_chunk = json.loads(text.split("\n\n")[-3].removeprefix("data: "))
        for answer in (whole, usage_chunk):
            assert answer["timings"]["predicted_n"] == answer["usage"]["completion_tokens"] == 2
        assert "timings" not in frontend.post(path, **body).json()


def test_streams_show_the_progress_of_the_prompt(frontend: FrontendProcess) -> None:
    total = len(token_ids(frontend, TEXT))
    for path, fields in (
        ("/completion", {"prompt": TEXT, "n_predict": 2}),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 2}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2},
        ),
    ):
        extra = {"return_progress": True, "timings_per_token": True}
        text = frontend.post(path, stream=True, **extra, **fields).text
        events = [json.loads(part[6:]) for part in text.split("\n\n") if part.startswith("data: {")]
        shown = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        assert events[: len(shown)] == [event for event in events if "prompt_progress" in event]
        assert len(events) > len(shown), "the answer follows"
        # The second event may be overtaken by the answer.
        assert [each["processed"] for each in shown] in ([0, 1, total], [0, total])
        timings = [event["timings"] for event in events[: len(shown)]]
        assert [each["prompt_n"] for each in timings] == [each["processed"] for each in shown]
        assert timings[0]["prompt_ms"] == 0.0 and not any(each["predicted_n"] for each in timings)
        assert (shown[-1]["total"], shown[-1]["cache"]) == (total, 0)
        assert "prompt_progress" not in frontend.post(path, stream=True, **fields).text


def test_responses_show_timings_and_progress(frontend: FrontendProcess) -> None:
    body = {"input": TEXT, "max_output_tokens": 3}
    extra = {"timings_per_token": True, "return_progress": True}
    whole = frontend.post("/v1/responses", **body, **extra).json()
    assert whole["timings"]["predicted_n"] == whole["usage"]["output_tokens"] == 3
    text = frontend.post("/v1/responses", stream=True, **body, **extra).text
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    shown = [event for event in events if "prompt_progress" in event]
    assert {event["type"] for event in shown} == {"response.in_progress"}
    assert [event["timings"]["prompt_n"] for event in shown] == [
        event["prompt_progress"]["processed"] for event in shown
    ]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert deltas and all(event["timings"]["predicted_n"] for event in deltas)
    assert events[-1]["timings"]["predicted_n"] == 3
    plain = frontend.post("/v1/responses", stream=True, **body).text
    assert "timings" not in plain and "prompt_progress" not in plain


def test_probabilities_have_ids_and_bytes(frontend: FrontendProcess) -> None:
    answer = complete(frontend, "Hello", n_predict=1, n_probs=3)
    [token] = answer["completion_probabilities"]
    assert token["id"] == token_ids(frontend, "Hello")[0]
    assert (token["token"], bytes(token["bytes"])) == ("Hello", b"Hello")
    assert all(top.keys() == token.keys() - {"top_logprobs"} for top in token["top_logprobs"])


def test_probabilities_after_sampling(frontend: FrontendProcess) -> None:
    answer = complete(frontend, "Hello", n_predict=1, n_probs=3, post_sampling_probs=True)
    assert answer["generation_settings"]["post_sampling_probs"]
    [token] = answer["completion_probabilities"]
    assert token.keys() == {"id", "token", "bytes", "prob", "top_probs"}
    for each in (token, *token["top_probs"]):
        assert 0 < each["prob"] <= 1
    assert sent_params(frontend, n_probs=3, post_sampling_probs=True).processed_logprobs


def sent_params(frontend: FrontendProcess, **fields: Any) -> Any:
    complete(frontend, "Hello", n_predict=1, **fields)
    added = [m for m in frontend.core.received if hasattr(m, "requests")][-1]
    return added.requests[0].sampling_params


def test_options_become_sampling_parameters(frontend: FrontendProcess) -> None:
    [hello] = token_ids(frontend, "Hello")
    biases = [["Hello", False], [7, 2.5], [8, -1000]]
    params = sent_params(frontend, logit_bias=biases, repeat_penalty=1.5, typical_p=0.5, seed=3)
    assert params.logit_bias == {hello: -100.0, 7: 2.5, 8: -100.0}
    assert (params.repetition_penalty, params.typical_p, params.seed) == (1.5, 0.5, 3)
    assert sent_params(frontend, logit_bias={"7": 1, "Hello": 2}).logit_bias == {7: 1, hello: 2}
    off = sent_params(frontend, repeat_penalty=1.5, presence_penalty=1, repeat_last_n=0, seed=-1)
    assert (off.repetition_penalty, off.presence_penalty) == (1, 0) and off.seed != -1
    # A sampler that is not listed has no effect, in both ways to write the list.
    for samplers in (["top_k", "temperature"], "kt"):
        few = sent_params(frontend, samplers=samplers, top_k=5, top_p=0.5, min_p=0.1, temperature=2)
        assert (few.top_k, few.top_p, few.min_p, few.temperature) == (5, 1.0, 0.0, 2.0)
        assert few.samplers == ("top_k", "temperature")
    more = {"top_n_sigma": 1, "xtc_probability": 0.5, "xtc_threshold": 0.2, "dynatemp_range": 0.3}
    sent = sent_params(frontend, **more, dynatemp_exponent=2, top_p=0.5, samplers="xt")
    assert (sent.samplers, sent.top_n_sigma, sent.top_p) == (("xtc", "temperature"), 0, 1)
    assert (sent.xtc_probability, sent.xtc_threshold) == (0.5, 0.2)
    assert (sent.dynatemp_range, sent.dynatemp_exponent) == (0.3, 2)


def test_repetitions_end_at_all_tokens_that_spell_a_breaker(frontend: FrontendProcess) -> None:
    dry = {"dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3, "dry_penalty_last_n": 9}
    params = sent_params(frontend, **dry, dry_sequence_breakers=["!", "USER:"]).dry
    assert (params.multiplier, params.base, params.allowed_length, params.last_n) == (0.8, 2, 3, 9)
    flat, breakers = int32_view(params.breaker_token_ids).tolist(), []
    while flat:
        breakers.append(flat[1 : 1 + flat[0]])
        flat = flat[1 + flat[0] :]
    tokenizer = frontend.tokenizer
    texts = [b"".join(map(tokenizer.token_bytes, breaker)) for breaker in breakers]
    assert all(b"!" in text or text.endswith(b"USER:") for text in texts)
    for text in ("!", "wow!!", "\nUSER:", " USER:", "SUPERUSER:"):
        spelled = list(tokenizer.encode(text, False))
        assert any(spelled[-len(breaker) :] == breaker for breaker in breakers), text
    settings = complete(frontend, "Hello", n_predict=1, **dry)["generation_settings"]
    assert settings["dry_sequence_breakers"] == ["\n", ":", '"', "*"]
    assert settings["samplers"][:3] == ["penalties", "dry", "temperature"]
    assert sent_params(frontend, **dry, samplers=["top_k"]).dry is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1, 2], [3, {}]]}, "prompt[1][1]"),
        ({"prompt": [1, 10_000_000]}, "prompt[1]"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": "y"}}, "prompt.multimodal_data"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["y"]}}, "prompt.multimodal_data"),
        (
            {"prompt": {"prompt_string": "<__media__>", "multimodal_data": ["y"]}},
            "prompt.multimodal_data",
        ),
        ({"prompt": "a" * 200_000}, "prompt"),
        ({"n_probs": 1000}, "n_probs"),
        ({"repeat_penalty": -1}, "repeat_penalty"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"n_cmpl": 0}, "n_cmpl"),
        ({"logit_bias": [["a"]]}, "logit_bias[0]"),
        ({"logit_bias": [["a", "b"]]}, "logit_bias[0][1]"),
        ({"mirostat": 2}, "mirostat"),
        ({"post_sampling_probs": "a"}, "post_sampling_probs"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora[0].id"),
        ({"grammar": 'root ::= "a"', "json_schema": {"type": "object"}}, "json_schema"),
        ({"grammar": 'root ::= "a'}, "grammar"),
    ],
)
def test_errors_name_the_field(frontend: FrontendProcess, fields: dict, param: str) -> None:
    response = frontend.post("/completion", **{"prompt": "Hi", "n_predict": 1} | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_infill_needs_a_model_that_fills_in_the_middle(frontend: FrontendProcess) -> None:
    response = frontend.post("/infill", input_prefix="a", input_suffix="b")
    assert response.status_code == 400
    assert "fill in the middle" in response.text and "use /completion" in response.text


def test_tokenize_and_detokenize(frontend: FrontendProcess) -> None:
    text = "Hello 媽 🤗"
    tokens = frontend.post("/tokenize", content=text).json()["tokens"]
    assert tokens == list(frontend.tokenizer.encode(text, False))
    assert frontend.post("/detokenize", tokens=tokens).json()["content"] == text
    pieces = frontend.post("/tokenize", content=text, with_pieces=True).json()["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    data = [p if isinstance(p := each["piece"], str) else bytes(p) for each in pieces]
    assert b"".join(p.encode() if isinstance(p, str) else p for p in data).decode() == text


def test_conversation_is_shown_and_counted(frontend: FrontendProcess) -> None:
    messages = [{"role": "user", "content": "What is up?"}]
    assert frontend.post("/apply-template", messages=messages).json() == {"prompt": "What is up?"}
    begun = [*messages, {"role": "assistant", "content": "The sky"}]
    whole = frontend.post("/apply-template", messages=begun).json()["prompt"]
    assert whole.endswith("The sky")
    for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"):
        count = frontend.post(path, messages=messages).json()
        assert count == {"input_tokens": len(token_ids(frontend, "What is up?"))}


def test_server_describes_itself(frontend: FrontendProcess) -> None:
    props = frontend.http.get("/props").json()
    settings = props["default_generation_settings"]
    assert (settings["n_ctx"], settings["params"]["n_predict"]) == (512, -1)
    assert props["model_alias"] == "echo" and "messages" in props["chat_template"]
    assert props["modalities"] == {"vision": False, "audio": False}
    slots = frontend.http.get("/slots?fail_on_no_slot=1").json()
    assert len(slots) == props["total_slots"]
    assert all(slot["n_ctx"] == 512 for slot in slots)
    assert frontend.http.get("/health").json()["status"] == "ok"
    assert frontend.http.get("/v1/health").json()["status"] == "ok"
    models = frontend.http.get("/v1/models").json()
    [described, *_], card = models["models"], models["data"][0]
    assert ("echo" in card["aliases"], card["tags"], card["meta"]["n_ctx"]) == (True, [], 512)
    assert (described["name"], described["capabilities"]) == ("echo", ["completion"])


def test_slot_of_a_running_answer_is_processing(slow_frontend: FrontendProcess) -> None:
    def num_processing() -> int:
        return sum(slot["is_processing"] for slot in slow_frontend.http.get("/slots").json())

    # The load of an idle server may be kept for a time.
    num_processing()
    body = {"prompt": TEXT, "n_predict": 50, "stream": True, "ignore_eos": True}
    with slow_frontend.http.stream("POST", "/completion", json=body) as response:
        lines = response.iter_lines()
        assert next(lines) and num_processing() == 1


@pytest.mark.parametrize(
    ("path", "status", "problem"),
    [
        ("/slots/0?action=save", 501, "--kv-disk"),
        ("/slots/0?action=restore", 501, "found by the prompt"),
        ("/slots/0?action=clear", 400, "must be save, restore or erase"),
        ("/slots/10000?action=erase", 400, "number of slots"),
        ("/models/unload", 501, "has one model"),
        ("/v1/chat/completions/control", 400, "id is required"),
        ("/models/load", 400, "model is required"),
        ("/lora-adapters", 400, "array of objects"),
    ],
)
def test_actions_without_a_mechanism_are_refused(
    frontend: FrontendProcess, path: str, status: int, problem: str
) -> None:
    answer = frontend.post(path)
    error = answer.json()["error"]
    assert answer.status_code == status and problem in error["message"], error
    if status == 501:
        assert error["type"] == "not_supported_error"


def test_erasing_a_slot_empties_the_cache(frontend: FrontendProcess) -> None:
    assert frontend.post("/slots/0?action=erase").json() == {"id_slot": 0}


def test_a_scaled_adapter_answers_for_the_base_model(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    with FrontendProcess(allow_runtime_lora_updating=True) as frontend:

        def listed() -> list[float]:
            return [each["scale"] for each in frontend.http.get("/lora-adapters").json()]

        def fingerprint(**fields: Any) -> str:
            answer = frontend.post("/v1/completions", prompt="a", max_tokens=1, **fields)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["system_fingerprint"])

        def set_scales(*scales: dict) -> Any:
            return frontend.http.post("/lora-adapters", json=list(scales))

        paths: dict[str, str] = {}
        for name in ("first", "second"):
            body = {"lora_name": name, "lora_path": str(tmp_path)}
            # SGLang's path of the route lists the adapters.
            loaded = frontend.post("/load_lora_adapter", **body, pinned=True)
            paths |= {name: str(tmp_path)}
            answer = {"success": True, "error_message": None, "loaded_adapters": paths}
            assert (loaded.status_code, loaded.json()) == (200, answer)
        refused = frontend.post("/load_lora_adapter", **body)
        assert (refused.status_code, refused.json()["success"]) == (400, False)
        assert "already been loaded" in refused.json()["error_message"]
        base, chosen = fingerprint(), fingerprint(lora=[{"id": 1, "scale": 1}])
        assert listed() == [0.0, 0.0] and chosen == fingerprint(model="second") != base
        assert set_scales({"id": 0, "scale": 0}, {"id": 1, "scale": 0.5}).json() == {
            "success": True
        }
        halved = fingerprint()
        assert listed() == [0.0, 0.5] and halved not in (base, chosen)
        assert fingerprint(lora=[]) == base
        assert fingerprint(lora=[{"id": 1, "scale": 0.5}]) == halved
        for scales, param in (
            ([{"id": 0, "scale": 1}, {"id": 1, "scale": 1}], "scales"),
            ([{"id": 2, "scale": 1}], "scales[0].id"),
            ([{"id": 1, "scale": -1000.1}], "scales[0].scale"),
        ):
            refused = set_scales(*scales)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        both = frontend.post(
            "/v1/completions", prompt="a", model="first", lora=[{"id": 1, "scale": 1}]
        )
        assert both.json()["error"]["param"] == "lora"
        assert set_scales().status_code == 200 and fingerprint() == base
