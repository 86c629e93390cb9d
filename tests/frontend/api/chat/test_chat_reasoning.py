"""Reasoning at /v1/chat/completions, whose core repeats the last message."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine.protocol.grammars.grammar import grammar_text
from llguidance import LLMatcher, LLTokenizer
from support.requests.chats import (
    CALLS,
    TIME,
    WEATHER,
    accumulate,
    chat,
    last_params,
    marked_tokenizer,
    num_tokens,
    user,
)
from support.servers.frontend_process import FrontendProcess, sse_events

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def thinking() -> Iterator[FrontendProcess]:
    with FrontendProcess(reasoning_parser="qwen3", tool_call_parser="hermes") as frontend:
        yield frontend


@pytest.mark.slow
def test_reasoning_is_separated_from_content(thinking: FrontendProcess) -> None:
    text = "<think>Let me see.</think>It is four."
    options = {"messages": user(text), "max_tokens": num_tokens(thinking, text)}
    answer = chat(thinking, **options)
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Let me see."
    assert message["content"] == "It is four."
    counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < counted < answer["usage"]["completion_tokens"]
    response = thinking.post(
        "/v1/chat/completions", stream=True, stream_options={"include_usage": True}, **options
    )
    *events, last = sse_events(response.text)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(d.get("reasoning", "") for d in deltas) == "Let me see."
    assert "".join(d.get("content") or "" for d in deltas) == "It is four."
    assert last["usage"] == answer["usage"]
    continuous = {"include_usage": True, "continuous_usage_stats": True}
    response = thinking.post(
        "/v1/chat/completions", stream=True, stream_options=continuous, **options
    )
    usages = [event["usage"] for event in sse_events(response.text)]
    counts = [usage["reasoning_tokens"] for usage in usages]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == counted
    assert usages[-1] == answer["usage"]
    # SGLang's route counts the token that ends the reasoning, too.
    sampling = {"max_new_tokens": num_tokens(thinking, text)}
    for requires in (True, False):
        body = {"text": text, "sampling_params": sampling, "require_reasoning": requires}
        meta = thinking.post("/generate", **body).json()["meta_info"]
        count = num_tokens(thinking, text.partition("</think>")[0])
        assert (meta["reasoning_tokens"] > count) is requires
    silent = chat(thinking, include_reasoning=False, **options)["choices"][0]["message"]
    assert silent["reasoning"] is silent["reasoning_content"] is None
    assert silent["content"] == "It is four."
    hides = options | {"include_reasoning": False, "logprobs": True, "return_token_ids": True}
    [choice] = chat(thinking, return_meta_info=True, **hides)["choices"]
    ids = thinking.tokenizer.encode(text)[num_tokens(thinking, "<think>Let me see.") :]
    assert choice["token_ids"] == ids and len(choice["logprobs"]["content"]) == len(ids)
    shown = choice["meta_info"]["output_token_logprobs"]
    assert [token_id for _, token_id, _ in shown] == ids
    events = sse_events(thinking.post("/v1/chat/completions", stream=True, **hides).text)
    choices = [event["choices"][0] for event in events]
    assert "".join(c["delta"].get("content") or "" for c in choices) == "It is four."
    streamed = [token for c in choices for token in c.get("token_ids") or ()]
    assert streamed and streamed == ids[-len(streamed) :]
    assert streamed[-1] == ids[-1]
    entries = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert len(entries) == len(streamed)
    whole = chat(thinking, separate_reasoning=False, **options)["choices"][0]["message"]
    assert "<think>" in whole["content"] and whole["reasoning"] is None
    held = {"stream": True, "stream_reasoning": False}
    events = sse_events(thinking.post("/v1/chat/completions", **held, **options).text)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert [d["reasoning"] for d in deltas if "reasoning" in d] == ["Let me see."]
    plain = chat(thinking, messages=user("Hello"), max_tokens=1)["choices"][0]["message"]
    assert plain["content"] == "Hello"
    assert plain["reasoning"] is plain["reasoning_content"] is None
    response = thinking.post("/v1/chat/completions", stream=True, messages=user("Hello"))
    assert all("reasoning" not in e["choices"][0]["delta"] for e in sse_events(response.text))


@pytest.mark.parametrize(
    ("text", "content"),
    [("<think>Let me see.", "Let me see."), ("<think>Let me see.</think>Four.", "Four.")],
)
def test_reasoning_alone_becomes_the_content_if_that_is_asked(
    thinking: FrontendProcess, text: str, content: str
) -> None:
    kwargs = {"force_nonempty_content": True}
    options = {"messages": user(text), "max_tokens": num_tokens(thinking, text)}
    options["chat_template_kwargs"] = kwargs
    message = chat(thinking, **options)["choices"][0]["message"]
    reasoning = None if content == "Let me see." else "Let me see."
    assert (message["content"], message["reasoning"]) == (content, reasoning)
    response = thinking.post("/v1/chat/completions", stream=True, **options)
    deltas = [event["choices"][0]["delta"] for event in sse_events(response.text)]
    assert "".join(d.get("content") or "" for d in deltas) == content
    assert "".join(d.get("reasoning") or "" for d in deltas) == "Let me see."


@pytest.mark.slow
def test_reasoning_may_precede_structural_tags(thinking: FrontendProcess) -> None:
    text = "<think>Let me see.</think>It is <n>4</n>."
    tag = {"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}
    form = {"type": "structural_tag", "structures": [tag], "triggers": ["<n>"]}
    options = {"messages": user(text), "max_tokens": num_tokens(thinking, text)}
    message = chat(thinking, response_format=form, **options)["choices"][0]["message"]
    assert message["reasoning"] == "Let me see."
    assert message["content"] == "It is <n>4</n>."


THOUGHT = "I take 2 and 3."

JSON_ANSWER = '\n{"sum": 5}'


def ask_both_ways(frontend: FrontendProcess, text: str, **fields) -> tuple[dict, dict]:
    """Return the message and the usage, after checking that a stream gives the same. The core answers `text`."""
    options = {"messages": user(text), "max_tokens": num_tokens(frontend, text), **fields}
    answer = chat(frontend, **options)
    message = answer["choices"][0]["message"]
    response = frontend.post(
        "/v1/chat/completions", stream=True, stream_options={"include_usage": True}, **options
    )
    *events, last = sse_events(response.text)
    calls, content, _ = accumulate(events)
    assert content == (message["content"] or "")
    assert calls == [call["function"] for call in message.get("tool_calls", [])]
    deltas = [event["choices"][0]["delta"] for event in events]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == (message.get(name) or "")
    assert last["usage"] == answer["usage"]
    return message, answer["usage"]


@pytest.mark.parametrize(
    "options",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": r"\s*\{.*\}"}},
        {"structured_outputs": {"choice": [JSON_ANSWER]}},
    ],
    ids=["format", "regex", "choice"],
)
def test_reasoning_precedes_a_constrained_answer(thinking: FrontendProcess, options: dict) -> None:
    message, usage = ask_both_ways(thinking, f"<think>{THOUGHT}</think>{JSON_ANSWER}", **options)
    assert message["reasoning"] == message["reasoning_content"] == THOUGHT
    assert message["content"] == JSON_ANSWER
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    assert usage["reasoning_tokens"] == counted
    assert counted == num_tokens(thinking, f"<think>{THOUGHT}")
    constraint = last_params(thinking).structured_output
    assert constraint.reasoning.ends == ("</think>",) and not constraint.reasoning.is_open
    silent = chat(
        thinking,
        messages=user(f"<think>{THOUGHT}</think>{JSON_ANSWER}"),
        include_reasoning=False,
        max_tokens=usage["completion_tokens"],
        **options,
    )
    assert silent["choices"][0]["message"]["reasoning"] is None
    assert silent["choices"][0]["message"]["content"] == JSON_ANSWER


@pytest.mark.parametrize(
    ("choice", "text", "names"),
    [
        ("required", CALLS, ["get_weather", "get_time"]),
        ({"type": "function", "function": {"name": "get_weather"}}, '{"city": "Oslo"}', None),
    ],
    ids=["required", "named"],
)
def test_reasoning_precedes_forced_calls(
    thinking: FrontendProcess, choice: object, text: str, names: list[str] | None
) -> None:
    thought = 'I could [{"name": "get_time"}] or not.'
    fields = {"tools": [WEATHER, TIME], "tool_choice": choice}
    message, usage = ask_both_ways(thinking, f"<think>{thought}</think>{text}", **fields)
    assert message["reasoning"] == thought and message["content"] is None
    calls = [call["function"] for call in message["tool_calls"]]
    assert [call["name"] for call in calls] == (names or ["get_weather"])
    if names is None:
        assert calls[0]["arguments"] == text
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    assert last_params(thinking).structured_output.reasoning is not None


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendProcess]:
    """A frontend whose tokenizer has tokens for the marks of reasoning."""
    path = marked_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    with FrontendProcess(
        reasoning_parser="qwen3", tool_call_parser="hermes", tokenizer_path=str(path)
    ) as frontend:
        yield frontend


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"response_format": {"type": "json_object"}}])
def test_reasoning_markers_may_be_special_tokens(special: FrontendProcess, options: dict) -> None:
    message, usage = ask_both_ways(special, '<think>Hmm.</think>{"sum": 5}', **options)
    assert message["reasoning"] == "Hmm." and message["content"] == '{"sum": 5}'
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 4
    if options:
        reasoning = last_params(special).structured_output.reasoning
        assert (reasoning.start_token_ids, reasoning.end_token_ids) == ((3,), (4,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"thinking_token_budget": 5}, 5),
        ({"thinking_token_budget": 0, "tools": [TIME]}, 0),
        ({"thinking_token_budget": 2, "response_format": {"type": "json_object"}}, 2),
        ({"thinking_budget_tokens": 2, "enable_thinking": True}, 2),
        ({"reasoning": {"max_tokens": 3}}, 3),
        ({"reasoning_effort": "minimal"}, 256),
    ],
)
def test_reasoning_ends_at_its_limit(special: FrontendProcess, options: dict, limit: int) -> None:
    chat(special, messages=user("Hi"), max_tokens=1, **options)
    grammar = grammar_text(last_params(special).structured_output)
    tokenizer = LLTokenizer(special.tokenizer.path.read_text(encoding="utf-8"))
    word, answer = special.tokenizer.encode(" one"), special.tokenizer.encode('{"a": 1}')
    start, end = (special.tokenizer.token_to_id(mark) for mark in ("<think>", "</think>"))
    for length, is_allowed in ((limit, True), (limit + 1, False)):
        token_ids = [start, *word * length, end, *answer]
        matcher = LLMatcher(tokenizer, grammar)
        num_read = matcher.try_consume_tokens(token_ids)
        assert num_read == (len(token_ids) if is_allowed else 1 + limit)
        assert matcher.is_accepting() == is_allowed


@pytest.mark.slow
def test_reasoning_limit_is_refused_where_it_cannot_hold(
    frontend: FrontendProcess, special: FrontendProcess
) -> None:
    for server, limit, problem in (
        (frontend, 5, "needs a model whose end-of-reasoning token is known"),
        (special, -2, "must be at least 0, or -1"),
    ):
        response = server.post(
            "/v1/chat/completions", messages=user("Hi"), thinking_token_budget=limit
        )
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "thinking_token_budget")
        assert problem in error["message"]
    # Clients of llama.cpp and Qwen's API send a limit to all models.
    assert chat(frontend, messages=user("Hi"), max_tokens=1, thinking_budget=5)["choices"]


def test_a_constraint_applies_from_the_first_token_without_reasoning(
    thinking: FrontendProcess, frontend: FrontendProcess
) -> None:
    closed = "<think>\n\n</think>"
    message, usage = ask_both_ways(thinking, closed, response_format={"type": "json_object"})
    assert message["content"] == closed and message["reasoning"] is None
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert last_params(thinking).structured_output.reasoning is None
    # Without a parser, reasoning is not recognized.
    text = f"<think>{THOUGHT}</think>{JSON_ANSWER}"
    message, _ = ask_both_ways(frontend, text, response_format={"type": "json_object"})
    assert message["content"] == text
    assert last_params(frontend).structured_output.reasoning is None
