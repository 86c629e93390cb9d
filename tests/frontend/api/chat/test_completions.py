"""The route /v1/completions. The core of these tests repeats each prompt over and over."""

from __future__ import annotations

from collections import defaultdict

import openai
import pytest
from engine.frontend.api.answer import find_likeliest
from engine.frontend.client.logprobs import PositionLogprobs
from engine.frontend.client.sequence_io import Delta
from support.requests.longest_wait import assert_delays_nobody
from support.servers.frontend_process import MODEL, FrontendProcess, sse_events

pytestmark = pytest.mark.slow

PROMPT = "One two three four five"
NUM_TOKENS = 5


def test_max_tokens_defaults_to_sixteen(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT)
    [choice] = answer.choices
    assert choice.text == PROMPT * 3 + "One"
    assert choice.finish_reason == "length"
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion"
    assert answer.model == MODEL and answer.system_fingerprint
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (NUM_TOKENS, 16)
    assert answer.usage.total_tokens == NUM_TOKENS + 16
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_model_may_be_omitted_or_an_alias(frontend: FrontendProcess) -> None:
    assert frontend.post("/v1/completions", prompt="a b").json()["model"] == MODEL
    for path, prompt in (
        ("/v1/completions", {"prompt": "a b"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b"}]}),
    ):
        aliased = frontend.post(path, model="echo-alias", max_tokens=2, **prompt)
        assert aliased.json()["model"] == MODEL
        streamed = frontend.post(path, model="echo-alias", max_tokens=2, stream=True, **prompt)
        assert {event["model"] for event in sse_events(streamed.text)} == {MODEL}
    assert frontend.http.get("/v1/models/echo-alias").json()["id"] == "echo-alias"


def test_a_repetition_ends_an_answer(frontend: FrontendProcess) -> None:
    """The answer repeats the five tokens of the prompt."""
    detection = {"max_pattern_size": 8, "min_count": 2}
    fields = {"max_tokens": 40, "repetition_detection": detection}
    answer = frontend.complete(PROMPT, **fields)
    [choice] = answer["choices"]
    assert choice["text"] == PROMPT * 2 and answer["usage"]["completion_tokens"] == 10
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    content = [{"role": "user", "content": PROMPT}]
    chat = frontend.post("/v1/chat/completions", messages=content, stream=True, **fields)
    reasons = [event["choices"][0]["finish_reason"] for event in sse_events(chat.text)]
    assert reasons[-1] == "repetition" and set(reasons[:-1]) == {None}


def test_null_means_omitted(frontend: FrontendProcess) -> None:
    nulls = dict.fromkeys(("n", "stop", "temperature", "max_tokens", "logprobs", "seed", "best_of"))
    assert frontend.complete(PROMPT, **nulls)["usage"]["completion_tokens"] == 16


def test_unsupported_fields_with_neutral_values_are_accepted(frontend: FrontendProcess) -> None:
    fields = {"lora_path": "", "stop_regex": [], "custom_logit_processor": "", "samplers": []}
    fields |= {"dry_multiplier": 0.0, "mirostat": 0, "xtc_probability": 0, "request_id": "mine"}
    answer = frontend.complete(PROMPT, best_of=2, n=2, max_tokens=1, stream_options={}, **fields)
    assert len(answer["choices"]) == 2 and answer["id"] == "cmpl-mine"
    options = {"include_usage": None}
    response = frontend.post("/v1/completions", prompt=PROMPT, stream_options=options)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream_options")


def test_field_names_of_other_servers_are_aliases(frontend: FrontendProcess) -> None:
    assert frontend.complete(PROMPT, n_predict=3)["usage"]["completion_tokens"] == 3
    assert frontend.complete(PROMPT, n_predict=3, max_tokens=2)["usage"]["completion_tokens"] == 2
    assert frontend.complete(PROMPT, max_new_tokens=3)["usage"]["completion_tokens"] == 3
    before = len(frontend.core.received)
    frontend.complete(PROMPT, repeat_penalty=1.5, min_new_tokens=3, random_seed=7)
    frontend.complete(
        PROMPT, repeat_penalty=1.5, repetition_penalty=1.2, guided_decoding_backend="x"
    )
    added = [m.requests[0] for m in frontend.core.received[before:] if hasattr(m, "requests")]
    first, second = (request.sampling_params for request in added)
    assert (first.repetition_penalty, first.min_tokens, first.seed) == (1.5, 3, 7)
    assert second.repetition_penalty == 1.2
    answer = frontend.complete(PROMPT, stop="three", no_stop_trim=True)
    assert answer["choices"][0]["text"] == "One two three"
    messages = [{"role": "user", "content": PROMPT}]
    for unlimited in ({"max_tokens": -1}, {"n_predict": -1}):
        assert frontend.complete(PROMPT, **unlimited)["usage"]["total_tokens"] == 512
    for field in ("max_tokens", "max_completion_tokens", "n_predict"):
        chat = frontend.post("/v1/chat/completions", messages=messages, **{field: -1}).json()
        assert chat["usage"]["total_tokens"] == 512


def test_streamed_text_equals_the_whole_text(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL,
        prompt="Grüße 😀 \u4f60\u597d!",
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    whole = client.completions.create(model=MODEL, prompt="Grüße 😀 \u4f60\u597d!", max_tokens=40)
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(c.usage is None for c in chunks)
    assert last.choices == [] and last.usage == whole.usage


def test_stream_has_no_usage_by_default(frontend: FrontendProcess) -> None:
    response = frontend.post("/v1/completions", prompt=PROMPT, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert all("usage" not in event for event in sse_events(response.text))


def test_continuous_usage_increases(frontend: FrontendProcess) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = frontend.post(
        "/v1/completions", prompt=PROMPT, max_tokens=12, stream=True, stream_options=options
    )
    counts = [event["usage"]["completion_tokens"] for event in sse_events(response.text)]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 12


def test_choices_of_several_prompts_are_indexed_prompt_first(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a b c", "x y"], n=2, max_tokens=2)
    assert [(c.index, c.text) for c in answer.choices] == [
        (0, "a b"),
        (1, "a b"),
        (2, "x y"),
        (3, "x y"),
    ]
    assert answer.usage.prompt_tokens == 3 + 2 and answer.usage.completion_tokens == 8


def test_streams_of_several_sequences_interleave(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt=["a b c", "x y"], n=2, max_tokens=30, stream=True
    )
    order, texts, ends = [], defaultdict(str), []
    for chunk in stream:
        [choice] = chunk.choices
        order.append(choice.index)
        texts[choice.index] += choice.text
        if choice.finish_reason:
            ends.append(choice.index)
    assert texts == {0: "a b c" * 10, 1: "a b c" * 10, 2: "x y" * 15, 3: "x y" * 15}
    assert sorted(ends) == [0, 1, 2, 3]
    assert order != sorted(order), "sequences take turns"


def test_prompt_may_be_token_ids(frontend: FrontendProcess) -> None:
    ids = frontend.tokenizer.encode(PROMPT)
    answer = frontend.complete(ids, max_tokens=5, return_token_ids=True)
    [choice] = answer["choices"]
    assert choice["text"] == PROMPT
    assert choice["token_ids"] == choice["prompt_token_ids"] == ids
    batch = frontend.complete([ids, ids[:2]], max_tokens=2)
    assert [c["text"] for c in batch["choices"]] == ["One two", "One two"]


def test_choices_of_n_have_different_seeds(frontend: FrontendProcess) -> None:
    core = frontend.core
    before = len(core.received)
    frontend.complete(PROMPT, n=3, seed=2**63 - 2)
    [added] = [m for m in core.received[before:] if hasattr(m, "requests")]
    seeds = [request.sampling_params.seed for request in added.requests]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)]


def test_seed_of_minus_one_means_none_and_other_negative_seeds_are_valid(
    frontend: FrontendProcess,
) -> None:
    def seeds(seed: int) -> list[int]:
        before = len(frontend.core.received)
        frontend.complete(PROMPT, n=2, seed=seed, max_tokens=1)
        [added] = [m for m in frontend.core.received[before:] if hasattr(m, "requests")]
        return [request.sampling_params.seed for request in added.requests]

    assert len({*seeds(-1), *seeds(-1), -1, 0}) == 6
    assert seeds(-2) == [-2, -1]


@pytest.mark.slow
def test_defaults_come_from_the_generation_config() -> None:
    defaults = {"temperature": 0.25, "top_k": 7, "top_p": 0.5}
    with FrontendProcess(default_sampling=defaults) as frontend:
        frontend.complete(PROMPT, top_k=9)
        [added] = [m for m in frontend.core.received if hasattr(m, "requests")][-1:]
        params = added.requests[0].sampling_params
        assert (params.temperature, params.top_k, params.top_p) == (0.25, 9, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "cases"),
    [
        (3, [({}, 3, 3), ({"max_tokens": 4096}, 3, 3), ({"max_tokens": 2}, 2, 2)]),
        (20, [({}, 16, 20)]),
    ],
)
def test_max_new_tokens_of_the_generation_config_limits_every_request(
    limit: int, cases: list[tuple[dict, int, int]]
) -> None:
    with FrontendProcess(default_sampling={"max_tokens": limit}) as frontend:
        for asked, completed, chatted in cases:
            answer = frontend.complete(PROMPT, **asked)
            assert answer["usage"]["completion_tokens"] == completed
            messages = [{"role": "user", "content": PROMPT}]
            chat = frontend.post("/v1/chat/completions", messages=messages, **asked).json()
            assert chat["usage"]["completion_tokens"] == chatted
        echoed = frontend.complete(PROMPT, echo=True, max_tokens=0)
        assert echoed["usage"]["completion_tokens"] == 0


def test_default_max_tokens_limits_requests_that_set_none() -> None:
    with FrontendProcess(default_max_tokens=3) as frontend:
        settings = frontend.http.get("/props").json()["default_generation_settings"]
        assert settings["params"]["n_predict"] == 3
        messages = [{"role": "user", "content": PROMPT}]
        for path, name, prompt in (
            ("/v1/completions", "max_tokens", {"prompt": PROMPT}),
            ("/v1/chat/completions", "max_tokens", {"messages": messages}),
            ("/completion", "n_predict", {"prompt": PROMPT}),
        ):
            for asked, num_tokens in (({}, 3), ({name: 5}, 5)):
                answer = frontend.post(path, **prompt, **asked).json()
                usage = answer.get("usage", {})
                assert usage.get("completion_tokens", answer.get("tokens_predicted")) == num_tokens


def test_stop_strings_end_the_text(frontend: FrontendProcess) -> None:
    [choice] = frontend.complete(PROMPT, stop="ee fo", max_tokens=50)["choices"]
    assert choice["text"] == "One two thr"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "ee fo")
    [choice] = frontend.complete(
        PROMPT, stop=["nothing", "four"], max_tokens=50, include_stop_str_in_output=True
    )["choices"]
    assert choice["text"] == "One two three four" and choice["stop_reason"] == "four"
    streamed = frontend.post(
        "/v1/completions", prompt=PROMPT, stop=["ee fo"], max_tokens=50, stream=True
    )
    events = sse_events(streamed.text)
    assert "".join(e["choices"][0]["text"] for e in events) == "One two thr"
    assert events[-1]["choices"][0]["stop_reason"] == "ee fo"


def test_stop_token_ends_the_text(frontend: FrontendProcess) -> None:
    ids = frontend.tokenizer.encode(PROMPT)
    [choice] = frontend.complete(ids, stop_token_ids=[ids[2]], max_tokens=50)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("One two", "stop")
    assert choice["stop_reason"] == ids[2]


def test_tokens_are_returned_as_ids_on_request(frontend: FrontendProcess) -> None:
    [choice] = frontend.complete(PROMPT, max_tokens=1, logprobs=1, return_tokens_as_token_ids=True)[
        "choices"
    ]
    token = frontend.tokenizer.encode(PROMPT)[0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}"]


def test_prompt_is_truncated_from_the_left(frontend: FrontendProcess) -> None:
    answer = frontend.complete(PROMPT, truncate_prompt_tokens=2, max_tokens=2, echo=True)
    assert answer["choices"][0]["text"] == " four five" * 2
    assert answer["usage"]["prompt_tokens"] == 2
    long = frontend.complete("a " * 5000, truncate_prompt_tokens=-1, max_tokens=2)
    assert long["usage"]["prompt_tokens"] == 510


def test_prompt_is_truncated_on_the_requested_side(frontend: FrontendProcess) -> None:
    fields = {"truncate_prompt_tokens": 2, "max_tokens": 2}
    for side, text in (("left", " four five"), ("right", "One two"), (None, " four five")):
        answer = frontend.complete(PROMPT, truncation_side=side, **fields)
        assert answer["choices"][0]["text"] == text
    messages = [{"role": "user", "content": PROMPT}]
    chat = frontend.post(
        "/v1/chat/completions", messages=messages, truncation_side="right", **fields
    )
    assert chat.json()["choices"][0]["message"]["content"] == "One two"


def test_best_of_returns_the_most_likely_candidates(frontend: FrontendProcess) -> None:
    before = len(frontend.core.received)
    answer = frontend.complete([PROMPT, "Six"], best_of=3, n=2, max_tokens=2, seed=1)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["One two"] * 2 + ["SixSix"] * 2
    assert answer["usage"]["completion_tokens"] == 12, "candidates that are not shown count too"
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    added = [m.requests for m in frontend.core.received[before:] if hasattr(m, "requests")]
    [requests] = added
    assert [request.sampling_params.seed for request in requests] == [1, 2, 3] * 2
    messages = [{"role": "user", "content": PROMPT}]
    chat = frontend.post("/v1/chat/completions", messages=messages, best_of=2, max_tokens=1).json()
    assert len(chat["choices"]) == 1 and chat["usage"]["completion_tokens"] == 2

    def output(*logprobs: float) -> Delta:
        return Delta("", [], [PositionLogprobs(1, logprob, 1, []) for logprob in logprobs])

    outputs = [output(-2, -2), output(-3), output(-0.5, -1), output(), output(-1), output(-0.1)]
    assert list(find_likeliest(outputs, 3, 1)) == [2, 5]
    assert list(find_likeliest(outputs, 3, 2)) == [2, 0, 5, 4]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_fields_that_were_not_requested_are_null(frontend: FrontendProcess, path: str) -> None:
    prompt = {"prompt": PROMPT, "messages": [{"role": "user", "content": PROMPT}]}
    answer = frontend.post(path, max_tokens=1, **prompt).json()
    [choice] = answer["choices"]
    of_prompt = choice if path == "/v1/completions" else answer
    for name in ("prompt_logprobs", "prompt_token_ids"):
        assert of_prompt.pop(name, "missing") is None
    assert choice["token_ids"] is None
    events = sse_events(frontend.post(path, max_tokens=1, stream=True, **prompt).text)
    assert not any("token_ids" in str(event) for event in events)


def test_sampling_parameters_reach_the_core(frontend: FrontendProcess) -> None:
    before = len(frontend.core.received)
    frontend.complete(
        PROMPT,
        temperature=0.5,
        top_p=0.9,
        top_k=10**9,
        min_p=0.1,
        typical_p=0.7,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "6": 1.5},
        bad_words=["nasty"],
        allowed_token_ids=[1, 2],
        min_tokens=2,
        ignore_eos=True,
        priority=3,
        user="tenant",
    )
    [added] = [m for m in frontend.core.received[before:] if hasattr(m, "requests")]
    [request] = added.requests
    params = request.sampling_params
    assert (params.temperature, params.top_p, params.min_p) == (0.5, 0.9, 0.1)
    assert params.typical_p == 0.7
    assert params.top_k == frontend.tokenizer.vocab_size, "no larger than the worker can hold"
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert params.repetition_penalty == 1.1 and params.logit_bias == {5: -100.0, 6: 1.5}
    assert params.bad_words_token_ids and params.allowed_token_ids == (1, 2)
    assert (params.min_tokens, params.ignore_eos) == (2, True)
    assert (request.priority, request.tenant) == (3, "tenant")


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("headers", "carried"),
    [
        ([("traceparent", PARENT)], {"traceparent": PARENT}),
        (
            [("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2")],
            {"traceparent": PARENT, "tracestate": "a=1,b=2"},
        ),
        ([("traceparent", PARENT), ("tracestate", "a=" + "1" * 600)], {"traceparent": PARENT}),
        ([("tracestate", "a=1")], None),
        ([("traceparent", PARENT.replace("7", "0").replace("00-", "ff-", 1))], None),
        ([("traceparent", "00-" + "0" * 32 + PARENT[35:])], None),
        ([("traceparent", PARENT), ("traceparent", PARENT)], None),
        ([], None),
    ],
)
def test_a_valid_trace_context_is_sent_to_the_core(
    frontend: FrontendProcess, headers: list[tuple[str, str]], carried: dict[str, str] | None
) -> None:
    before = len(frontend.core.received)
    body = {"model": MODEL, "prompt": PROMPT, "n": 2, "max_tokens": 2}
    response = frontend.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    requests = [
        request
        for message in frontend.core.received[before:]
        for request in getattr(message, "requests", ())
    ]
    assert [request.trace_headers for request in requests] == [carried] * 2


def test_integers_may_be_written_with_a_fraction_of_zero(frontend: FrontendProcess) -> None:
    before = len(frontend.core.received)
    schema = {"type": "number", "multipleOf": 2.0, "const": 4.0}
    ids = [float(token_id) for token_id in frontend.tokenizer.encode(PROMPT)]
    answer = frontend.complete(
        ids,
        n=2.0,
        max_tokens=3.0,
        stop_token_ids=[1.0],
        seed=-(2.0**63),
        temperature=1.0,
        logit_bias={"5": 2.0},
        metadata={"n": 2.0},
        structured_outputs={"json": schema},
    )
    assert [choice["text"] for choice in answer["choices"]] == ["One two three"] * 2
    [added] = [m for m in frontend.core.received[before:] if hasattr(m, "requests")]
    params = added.requests[0].sampling_params
    assert (params.max_tokens, params.stop_token_ids, params.seed) == (3, (1,), -(2**63))
    spec = '{"type":"number","multipleOf":2.0,"const":4.0,' + LENIENT
    assert params.structured_output.spec == spec


LENIENT = '"x-guidance":{"lenient":true}}'


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "kind", "spec"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "object"}},
                }
            },
            "json_schema",
            '{"type":"object",' + LENIENT,
        ),
        (
            {"structured_outputs": {"json": '{"type": "object"}'}},
            "json_schema",
            '{"type":"object",' + LENIENT,
        ),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "choice", '["yes","no"]'),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, "grammar", 'start: "x"'),
        *(
            (
                {"response_format": {"type": kind, name: {"type": "array"}}},
                "json_schema",
                '{"type":"array",' + LENIENT,
            )
            for kind, name in (
                ("json_object", "schema"),
                ("json_object", "value"),
                ("json_schema", "schema"),
            )
        ),
        ({"response_format": {"type": "json_object", "schema": {}}}, "json_object", ""),
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": 'root ::= "x"'}, "grammar", 'root ::= "x"'),
        ({"grammar": 'root ::= "x"', "regex": ""}, "grammar", 'root ::= "x"'),
        (
            {"json_schema": {"type": "array"}, "grammar": ""},
            "json_schema",
            '{"type":"array",' + LENIENT,
        ),
        ({"json_schema": '{"type": "array"}'}, "json_schema", '{"type":"array",' + LENIENT),
        ({"guided_json": {"type": "array"}}, "json_schema", '{"type":"array",' + LENIENT),
        (
            {"guided_json": {"type": "array"}, "guided_whitespace_pattern": " ?"},
            "json_schema",
            '{"type":"array","x-guidance":{"lenient":true,"whitespace_pattern":" ?"}}',
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            "json_schema",
            '{"type":"object","x-guidance":{"whitespace_flexible":false}}',
        ),
        ({"guided_regex": "a+", "guided_json": None}, "regex", "a+"),
        ({"guided_choice": ["yes", "no"]}, "choice", '["yes","no"]'),
        ({"guided_grammar": 'root ::= "x"'}, "grammar", 'root ::= "x"'),
    ],
)
def test_structured_outputs_reach_the_core(
    frontend: FrontendProcess, path: str, fields: dict, kind: str, spec: str
) -> None:
    before = len(frontend.core.received)
    prompt = {"prompt": PROMPT, "messages": [{"role": "user", "content": PROMPT}]}
    response = frontend.post(path, max_tokens=1, **prompt, **fields)
    assert response.status_code == 200, response.text
    [added] = [m for m in frontend.core.received[before:] if hasattr(m, "requests")]
    constraint = added.requests[0].sampling_params.structured_output
    assert (constraint.kind, constraint.spec) == (kind, spec)


@pytest.mark.slow
def test_long_prompts_do_not_delay_other_requests() -> None:
    with FrontendProcess(max_model_len=400_000) as frontend:
        text = "The quick brown fox jumps over the lazy dog. " * 20_000
        answer = assert_delays_nobody(
            str(frontend.http.base_url),
            [frontend.process.pid],
            lambda: frontend.complete(text, max_tokens=1),
        )
        assert answer["usage"]["prompt_tokens"] > 180_000
