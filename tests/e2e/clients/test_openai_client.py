"""The default model, used through the official OpenAI client."""

from __future__ import annotations

import concurrent.futures
import math

import openai
import pytest
from support.servers.server import Server

MODEL = "smollm2"
QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]


def complete(client: openai.OpenAI, prompt, **options) -> openai.types.Completion:
    options.setdefault("temperature", 0)
    return client.completions.create(model=MODEL, prompt=prompt, **options)


def test_chat_answers_correctly(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=40
    )
    assert "4" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_completion_names_the_capital(client: openai.OpenAI) -> None:
    assert (
        complete(client, "The capital of France is", max_tokens=3)
        .choices[0]
        .text.startswith(" Paris")
    )


def test_streamed_chat_gives_the_same_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=40
    )
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_batch_of_prompts_with_n_has_all_choices(client: openai.OpenAI) -> None:
    answer = complete(
        client, ["One two three", "Red green blue"], n=2, temperature=0.8, seed=7, max_tokens=8
    )
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text != answer.choices[1].text
    again = complete(
        client, ["One two three", "Red green blue"], n=2, temperature=0.8, seed=7, max_tokens=8
    )
    assert [c.text for c in answer.choices] == [c.text for c in again.choices]


def test_prompt_may_be_token_ids(client: openai.OpenAI, server: Server) -> None:
    _, tokenized = server.post("/tokenize", {"model": MODEL, "prompt": "The sky is"})
    by_text = complete(client, "The sky is", max_tokens=8)
    by_ids = complete(client, tokenized["tokens"], max_tokens=8)
    assert by_text.choices[0].text == by_ids.choices[0].text
    _, text = server.post("/detokenize", {"model": MODEL, "tokens": tokenized["tokens"]})
    assert text["prompt"] == "The sky is"


def test_stop_string_may_span_tokens(client: openai.OpenAI) -> None:
    free = complete(client, "Count: 1, 2, 3,", max_tokens=32).choices[0].text
    stop = free[9:13]
    stopped = complete(client, "Count: 1, 2, 3,", max_tokens=32, stop=[stop]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == free[: free.index(stop)]
    kept = complete(
        client,
        "Count: 1, 2, 3,",
        max_tokens=32,
        stop=[stop],
        extra_body={"include_stop_str_in_output": True},
    ).choices[0]
    assert kept.text == stopped.text + stop


def test_logprobs_are_consistent_with_the_greedy_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=6, logprobs=True, top_logprobs=5
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        assert token.token == token.top_logprobs[0].token, "greedy takes the most likely"
        assert token.logprob == token.top_logprobs[0].logprob
        assert sum(math.exp(t.logprob) for t in token.top_logprobs) <= 1.0001
        assert bytes(token.bytes).decode(errors="ignore") in (token.token, "")
    assert "".join(t.token for t in content).startswith(answer.choices[0].message.content)


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI) -> None:
    answer = complete(
        client, "The capital of France is Paris", max_tokens=0, echo=True, logprobs=1
    ).choices[0]
    assert answer.text == "The capital of France is Paris"
    scores = answer.logprobs.token_logprobs
    assert scores[0] is None and all(s <= 0 for s in scores[1:])
    absurd = complete(
        client, "The capital of France is Banana", max_tokens=0, echo=True, logprobs=1
    ).choices[0]
    assert scores[-1] > absurd.logprobs.token_logprobs[5]


def test_ignore_eos_and_min_tokens_extend_the_output(client: openai.OpenAI) -> None:
    short = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=64
    )
    assert short.usage.completion_tokens < 64
    long = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=64,
        extra_body={"ignore_eos": True},
    )
    assert long.usage.completion_tokens == 64 and long.choices[0].finish_reason == "length"
    held = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=64, extra_body={"min_tokens": 40}
    )
    assert held.usage.completion_tokens >= 40


def test_prefix_is_cached_and_reported(client: openai.OpenAI, server: Server) -> None:
    prompt = "A long story about a lighthouse keeper. " * 20
    first = complete(client, prompt, max_tokens=4)
    second = complete(client, prompt, max_tokens=4)
    assert second.choices[0].text == first.choices[0].text
    assert second.usage.prompt_tokens_details.cached_tokens >= 0.8 * second.usage.prompt_tokens
    assert server.post("/reset_prefix_cache", {})[0] == 200
    third = complete(client, prompt, max_tokens=4)
    assert third.usage.prompt_tokens_details.cached_tokens == 0
    salted = complete(client, prompt, max_tokens=4, extra_body={"cache_salt": "other"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_many_concurrent_requests_are_all_answered(client: openai.OpenAI, server: Server) -> None:
    prompts = [f"Write {i} words about the number {i}." for i in range(24)]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda p: complete(client, p, max_tokens=24), prompts))
    assert all(a.usage.completion_tokens > 0 for a in answers)
    assert server.metric("engine:num_requests_running") == 0


def test_output_follows_the_json_schema(client: openai.OpenAI) -> None:
    import json

    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "population": {"type": "integer", "minimum": 0, "maximum": 10**8},
        },
        "required": ["city", "population"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe Paris as JSON."}],
        temperature=0.7,
        seed=3,
        max_tokens=100,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": schema, "strict": True},
        },
    )
    assert answer.choices[0].finish_reason == "stop"
    value = json.loads(answer.choices[0].message.content)
    assert set(value) == {"city", "population"} and isinstance(value["population"], int)


def test_named_tool_is_called_with_valid_arguments(client: openai.OpenAI) -> None:
    import json

    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
        max_tokens=100,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"logprobs": 999}, "logprobs"),
    ],
)
def test_error_for_a_parameter_names_the_field(
    client: openai.OpenAI, options: dict, field: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, "hello", **options)
    assert caught.value.body["param"] == field
    assert complete(client, "hello", max_tokens=1).choices, "the server goes on"


def test_unknown_model_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt="x")
