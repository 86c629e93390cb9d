"""Every invalid request gets one clear error that names the field, and the server keeps serving."""

from __future__ import annotations

import gzip
import json
import socket
import urllib.error
import urllib.request

import httpx
import openai
import pytest
from support.frontend_process import MODEL, FrontendProcess

pytestmark = pytest.mark.slow

PROMPT = "One two three"
USER = [{"role": "user", "content": PROMPT}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f"}}


def error_of(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert response.headers["x-request-id"]
    return error


def goes_on(frontend: FrontendProcess) -> None:
    assert frontend.http.get("/health").status_code == 200
    assert frontend.complete(PROMPT, max_tokens=1)["choices"][0]["text"] == "One"


BAD_FIELDS = [
    # (fields, the param that the error names, what its message says)
    ({"temperature": -1}, "temperature", "[0, 100], got -1"),
    ({"temperature": "hot"}, "temperature", 'must be a number or null, got "hot"'),
    ({"top_p": -1}, "top_p", "[0, 1], got -1"),
    ({"top_p": 1.5}, "top_p", "got 1.5"),
    ({"top_k": -2}, "top_k", "at least -1, got -2"),
    ({"top_k": 10**30}, "top_k", "9223372036854775807"),
    ({"min_p": 2}, "min_p", "got 2"),
    ({"n": 0}, "n", "between 1 and 128, got 0"),
    ({"n": 10**6}, "n", "got 1000000"),
    ({"n": 1.5}, "n", "an integer or null, got 1.5"),
    ({"n": 1.5, "max_tokens": 1.0}, "n", "an integer or null, got 1.5"),
    ({"n": 1e300}, "n", "an integer <= 9223372036854775807, got 1e300"),
    ({"n": True}, "n", "an integer or null, got true"),
    ({"n": [1]}, "n", "got [1]"),
    ({"max_tokens": -2}, "max_tokens", "at least 1, got -2"),
    ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
    ({"max_tokens": 100_000}, "max_tokens", "maximum context length is 512 tokens"),
    ({"max_tokens": 2**80}, "max_tokens", "max_tokens"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens", "got 20"),
    ({"presence_penalty": 3}, "presence_penalty", "[-2, 2], got 3"),
    ({"frequency_penalty": -3}, "frequency_penalty", "got -3"),
    ({"repetition_penalty": 0}, "repetition_penalty", "got 0"),
    ({"seed": 2**63}, "seed", "9223372036854775807"),
    ({"seed": "x"}, "seed", "an integer"),
    ({"stop": 5}, "stop", "got 5"),
    ({"stop": [1]}, "stop[0]", "a string, got 1"),
    ({"stop": [""]}, "stop", "empty"),
    ({"stop": ["x"] * 65}, "stop", "at most 64 entries, got 65"),
    ({"stop": ["x" * 5000] * 2}, "stop", "at most 8192 characters, got 10000"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids", "1000000"),
    ({"logit_bias": {"a": 1}}, "logit_bias", 'token ids, got "a"'),
    ({"logit_bias": {"9999999": 1}}, "logit_bias", "9999999"),
    ({"logit_bias": {"5": 101}}, "logit_bias[5]", "101"),
    ({"logit_bias": {"5": "x"}}, "logit_bias[5]", 'a number, got "x"'),
    ({"logit_bias": {"3": 1, "5": None}}, "logit_bias[5]", "a number, got null"),
    ({"top_p": 10**400}, "top_p", "a number that fits in 64 bits, got 1000"),
    ({"logit_bias": [5]}, "logit_bias", "an object or null, got [5]"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", "-1"),
    ({"bad_words": [" "]}, "bad_words", "empty"),
    ({"bad_words": ["a" * 20_000]}, "bad_words", "at most 16384 characters, got 20000"),
    ({"stop_token_ids": [5] * 2000}, "stop_token_ids", "at most 1024 entries, got 2000"),
    ({"allowed_token_ids": [5] * 50_000}, "allowed_token_ids", "entries, got 50000"),
    (
        {"allowed_token_ids": [*range(40_000)], "n": 128},
        "allowed_token_ids",
        "5120000 in total, but at most 4194304",
    ),
    ({"user": "u" * 257}, "user", "at most 256 characters, got 257"),
    ({"priority": 2**40}, "priority", "32 bits"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "got 0"),
    ({"truncate_prompt_tokens": 10_000}, "truncate_prompt_tokens", "got 10000"),
    ({"stream": "yes"}, "stream", 'a boolean or null, got "yes"'),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage", "3"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
    ({"prompt_logprobs": -2}, "prompt_logprobs", "got -2"),
    ({"guided_json": 5}, "guided_json", "got 5"),
    ({"guided_regex": "(a"}, "guided_regex", "compiled"),
    ({"guided_choice": []}, "guided_choice", "array of strings"),
    ({"guided_grammar": "x"}, "guided_grammar", "compiled"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "combined with guided_regex"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
    ({"best_of": 1, "n": 2}, "best_of", "between n=2 and 128, got 1"),
    ({"best_of": 129}, "best_of", "got 129"),
    ({"best_of": 3, "n": 2, "stream": True}, "best_of", "in a stream, got 3"),
    ({"lora_path": "x"}, "lora_path", "not supported"),
    ({"stop_regex": "a+"}, "stop_regex", "use stop"),
    ({"custom_logit_processor": "x"}, "custom_logit_processor", "use logit_bias"),
    ({"typical_p": 0}, "typical_p", "(0, 1], got 0"),
    ({"suffix": "end"}, "suffix", "suffix"),
    ({"prompt_embeds": "x"}, "prompt_embeds", "prompt_embeds"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids", "not supported"),
    ({"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection", "not supported"),
    ({"top_n_sigma": 1}, "top_n_sigma", "got 1"),
    ({"repeat_penalty": 0}, "repeat_penalty", "repeat_penalty must be in [0.01, 100], got 0"),
    ({"min_new_tokens": -1}, "min_new_tokens", "got -1"),
    ({"truncation_side": "middle"}, "truncation_side", '"left" or "right", got "middle"'),
    ({"dry_multiplier": 0.8}, "dry_multiplier", "got 0.8"),
    ({"mirostat": 2}, "mirostat", "got 2"),
    ({"xtc_probability": 0.1}, "xtc_probability", "got 0.1"),
    ({"n_predict": -2}, "n_predict", "got -2"),
    ({"max_new_tokens": 10**6}, "max_new_tokens", "or max_new_tokens."),
    ({"use_beam_search": True, "stream": True}, "stream", "not supported with use_beam_search"),
    ({"logits_processors": ["x"]}, "logits_processors", "not supported"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params", "not supported"),
    ({"response_format": "json"}, "response_format", 'an object or null, got "json"'),
    ({"response_format": {"type": "xml"}}, "response_format.type", 'got "xml"'),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "null"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "required",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "{"}}},
        "response_format.json_schema.schema",
        "not valid JSON",
    ),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "regex"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "non-empty"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "array of strings"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "compiled"),
    ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs", "nowhere"),
    ({"structured_outputs": {"json": {"type": "strange"}}}, "structured_outputs", "strange"),
    ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, "structured_outputs", "one"),
    ({"regex": "(a"}, "regex", "regex is not a regex that can be compiled"),
    ({"ebnf": "root ::= nowhere"}, "ebnf", "ebnf"),
    ({"grammar": 5}, "grammar", "a string"),
    ({"json_schema": "{"}, "json_schema", "not valid JSON"),
    ({"json_schema": 5}, "json_schema", "got 5"),
    ({"json_schema": {}, "grammar": "x"}, "json_schema", "cannot be combined with grammar"),
    (
        {"response_format": {"type": "json_object"}, "ebnf": "x"},
        "ebnf",
        "cannot be combined with response_format",
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "cannot be combined with response_format",
    ),
    (
        {"response_format": {"type": "json_object", "schema": 5}},
        "response_format.schema",
        "a JSON schema (an object), got 5",
    ),
    (
        {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
        "not supported",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}},
        "response_format",
        "response_format is not a json_schema that can be compiled",
    ),
]

COMPLETION_ONLY = [
    ({"prompt": None}, "prompt", "required"),
    ({"prompt": ""}, "prompt", "at least one token"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": ["a", ""]}, "prompt[1]", "at least one token"),
    ({"prompt": ["a", [1]]}, "prompt[1]", "a string like the first"),
    ({"prompt": [[1], []]}, "prompt[1]", "at least one token"),
    ({"prompt": [1, -1]}, "prompt[1]", "got -1"),
    ({"prompt": [[1, 10**6]]}, "prompt[0][1]", "got 1000000"),
    ({"prompt": [1, "a"]}, "prompt", "token ids only"),
    ({"prompt": [1, "2"]}, "prompt", "token ids only"),
    ({"prompt": [1, [2]]}, "prompt", "token ids only"),
    ({"prompt": {"a": 1}}, "prompt", 'got {"a":1}'),
    ({"prompt": [1.5]}, "prompt[0]", "got 1.5"),
    ({"prompt": [1] * 512}, "prompt", "maximum context length is 512 tokens"),
    ({"prompt": "word " * 600}, "prompt", "maximum context length is 512 tokens"),
    ({"prompt": "x" * 200_000}, "prompt", "200000 characters"),
    ({"prompt": ["a"] * 100, "n": 100}, "prompt", "10000 sequences, but at most 4096"),
    ({"prompt": ["a"] * 5000}, "prompt", "5000 sequences, but at most 4096"),
    ({"logprobs": 21}, "logprobs", "at most 20"),
    ({"logprobs": True}, "logprobs", "an integer"),
    ({"logprobs": -1}, "logprobs", "at most 20 (--max-logprobs), got -1, which means all"),
    ({"echo": 1}, "echo", "a boolean"),
]

CHAT_ONLY = [
    ({"messages": None}, "messages", "required"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": "hi"}, "messages", 'got "hi"'),
    ({"messages": ["hi"]}, "messages[0]", 'an object, got "hi"'),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "role"),
    ({"messages": [{"role": 1, "content": "hi"}]}, "messages[0].role", "1"),
    ({"messages": [{"role": None, "content": "hi"}]}, "messages[0].role", "got null"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0].type", "got null"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
        "image_url",
    ),
    (
        {"messages": [*USER, {"role": "assistant", "tool_calls": 5}]},
        "messages[1].tool_calls",
        "an array, got 5",
    ),
    (
        {"messages": [*USER, {"role": "assistant", "tool_calls": {"f": 1}}]},
        "messages[1].tool_calls",
        'an array, got {"f":1}',
    ),
    ({"messages": [{"role": "user", "content": "w " * 600}]}, "messages", "512 tokens"),
    ({"messages": [{"role": "user", "content": "x" * 200_000}]}, "messages", "characters"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1, got 0"),
    ({"max_completion_tokens": 600}, "max_completion_tokens", "or max_completion_tokens."),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "got -1, which means all 49152"),
    ({"web_search_options": {}}, "web_search_options", "does not search the web"),
    ({"prediction": "x"}, "prediction", "an object"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"logprobs": 3}, "logprobs", "a boolean"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": "auto", "tools": None}, "tool_choice", "needs tools"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": []},
        "tool_choice",
        "needs tools",
    ),
    ({"tool_choice": "sometimes", "tools": [TOOL]}, "tool_choice", '"sometimes"'),
    (
        {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]},
        "tool_choice",
        '"g"',
    ),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "retrieval"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "an object"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "null"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]},
        "tools[0].function.parameters",
        "3",
    ),
    (
        {
            "tools": [{"function": {"name": "f", "parameters": {"type": "odd"}}}],
            "tool_choice": "required",
        },
        "tools[0].function.parameters",
        "tools[0].function.parameters of f is not a json_schema that can be compiled",
    ),
    (
        {
            "tools": [
                {"function": {"name": "f", "parameters": {"not": {}}}},
                {"function": {"name": "g", "parameters": {"not": {}}, "strict": True}},
            ],
            "tool_choice": "required",
        },
        "tools[1].function.parameters",
        "tools[1].function.parameters of g is not a json_schema that can be compiled",
    ),
    (
        {
            "tools": [{"function": {"name": "g", "parameters": {"not": {}}, "strict": True}}],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
        "tools[0].function.parameters",
        "tools[0].function.parameters of g is not a json_schema that can be compiled",
    ),
    ({"tools": [TOOL]}, "tools", "--tool-call-parser"),
    ({"functions": [{"name": "f"}]}, "tools", "--tool-call-parser"),
    ({"functions": [{"name": ""}]}, "functions[0].name", "1 to 128 letters"),
    ({"functions": [{"name": "f"}], "tools": [TOOL]}, "functions", "combined with tools"),
    ({"function_call": {"name": "f"}}, "function_call", "needs functions"),
    ({"function_call": "required", "functions": [{"name": "f"}]}, "function_call", "none, auto"),
    ({"function_call": "auto", "tools": [TOOL]}, "function_call", "use tool_choice"),
    (
        {"function_call": {"name": "g"}, "functions": [{"name": "f"}]},
        "function_call",
        'must name one of the tools f, got "g"',
    ),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
    *(
        (
            {**form, "tools": [TOOL], "tool_choice": choice},
            next(iter(form)),
            "cannot be combined with tool_choice",
        )
        for form in (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"regex": "a+"}},
            {"regex": "a+"},
        )
        for choice in (
            "required",
            {"type": "function", "function": {"name": "f"}},
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [TOOL]},
            },
        )
    ),
    *(
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", **rest}}, param, says)
        for rest, param, says in (
            ({}, "tool_choice.mode", '"auto" or "required", got null'),
            ({"allowed_tools": 5}, "tool_choice.allowed_tools", "an object, got 5"),
            ({"mode": "auto", "tools": []}, "tool_choice.tools", "non-empty array"),
            (
                {"mode": "auto", "tools": [{"type": "function", "name": "g"}]},
                "tool_choice.tools[0]",
                "one of the tools f",
            ),
        )
    ),
    *(
        ({"tools": [{"type": "custom", "custom": custom}], "tool_choice": "required"}, param, says)
        for custom, param, says in (
            ({"name": "a b"}, "tools[0].custom.name", '"a b"'),
            ({"name": "f", "description": 1}, "tools[0].custom.description", "a string"),
            ({"name": "f", "format": {"type": "x"}}, "tools[0].custom.format.type", '"x"'),
            (
                {"name": "f", "format": {"type": "grammar", "grammar": {"syntax": "lark"}}},
                "tools[0].custom.format.grammar.definition",
                "null",
            ),
            (
                {
                    "name": "f",
                    "format": {
                        "type": "grammar",
                        "grammar": {"syntax": "lark", "definition": "start: X"},
                    },
                },
                "tools[0].custom.format.grammar.syntax",
                "name the tool in tool_choice",
            ),
            (
                {
                    "name": "f",
                    "format": {
                        "type": "grammar",
                        "grammar": {"syntax": "regex", "definition": "("},
                    },
                },
                "tools[0].custom.format",
                "can be compiled",
            ),
        )
    ),
    ({"chat_template": "{{ x }}"}, "chat_template", "--chat-template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "not allowed"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", ""),
    ({"modalities": ["audio"]}, "modalities", "audio"),
    ({"audio": {"voice": "x"}}, "audio", "not supported"),
    ({"echo": 1}, "echo", "a boolean"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("fields", "param", "says"), BAD_FIELDS)
def test_invalid_field_is_named(
    frontend: FrontendProcess, path: str, fields: dict, param: str, says: str
) -> None:
    prompt = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": USER}
    response = frontend.post(path, **{"model": MODEL, **prompt, **fields})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]
    assert not frontend.core.requests, "nothing was started"
    goes_on(frontend)


@pytest.mark.parametrize(("fields", "param", "says"), COMPLETION_ONLY)
def test_invalid_completion_field_is_named(
    frontend: FrontendProcess, fields: dict, param: str, says: str
) -> None:
    response = frontend.post(COMPLETIONS, **{"model": MODEL, "prompt": PROMPT, **fields})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["param"] == param and says in error["message"]
    goes_on(frontend)


@pytest.mark.parametrize(("fields", "param", "says"), CHAT_ONLY)
def test_invalid_chat_field_is_named(
    frontend: FrontendProcess, fields: dict, param: str, says: str
) -> None:
    response = frontend.post(CHAT, **{"model": MODEL, "messages": USER, **fields})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["param"] == param and says in error["message"]
    goes_on(frontend)


@pytest.mark.parametrize("depth", [*range(950, 1000, 2), 5_000])
def test_json_in_strings_nested_too_deeply_is_rejected(
    frontend: FrontendProcess, depth: int
) -> None:
    """At any depth that is too much, the error names the field and nothing is logged."""
    deep = '{"items":' * depth + "{}" + "}" * depth
    function = {"name": "f", "arguments": deep}
    calls = [{"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}]
    cases = {
        "messages[0].tool_calls[0].function.arguments": {"messages": calls + USER},
        "response_format.json_schema.schema": {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": deep},
            }
        },
        "json_schema": {"json_schema": deep},
        "structured_outputs.structural_tag": {
            "structured_outputs": {"structural_tag": f'{{"structures": [{deep}]}}'}
        },
    }
    for param, fields in cases.items():
        response = frontend.post(CHAT, **{"messages": USER, "max_tokens": 1} | fields)
        if response.status_code != 200 or depth == 5_000:
            assert response.status_code == 400, response.text
            assert param.startswith(error_of(response)["param"])
    body = b'{"messages": [{"role": "user", "content": "a"}], "tool_choice": "required", "tools": '
    body += b'[{"function": {"name": "f", "parameters": ' + deep.encode() + b"}}]}"
    assert frontend.http.post(CHAT, content=body).status_code in (200, 400)
    goes_on(frontend)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "a"} x',
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"temperature": NaN, "prompt": "a"}',
        b'{"metadata": ' + b"[" * 100_000,
        b'{"metadata": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001,
        b'{"seed": ' + b"9" * 10_000 + b"}",
        b"\x00\x01\x02",
        b"model=echo&prompt=a",
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_malformed_body_is_rejected(frontend: FrontendProcess, path: str, body: bytes) -> None:
    response = frontend.http.post(path, content=body)
    assert response.status_code == 400, response.text
    assert len(error_of(response)["message"]) < 500
    goes_on(frontend)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_empty_body_error_says_that_it_is_empty(frontend: FrontendProcess, path: str) -> None:
    for body in (b"", b" \n"):
        response = frontend.http.post(path, content=body)
        assert response.status_code == 400
        assert error_of(response)["message"] == "the request body is empty"


@pytest.mark.parametrize("number", [b"1e400", b"-1e400", b"9" * 5000])
@pytest.mark.parametrize(
    ("field", "param"),
    [
        (b'"temperature": %b', "temperature"),
        (b'"n": %b', "n"),
        (b'"stop_token_ids": [1, %b]', "stop_token_ids[1]"),
        (b'"logit_bias": {"7": 1, "8": %b}', "logit_bias[8]"),
        (b'"response_format": {"type": "text", "a": {"b": [%b]}}', "response_format[a][b][0]"),
    ],
)
def test_number_out_of_range_names_its_field(
    frontend: FrontendProcess, field: bytes, param: str, number: bytes
) -> None:
    response = frontend.http.post(COMPLETIONS, content=b'{"prompt": "a", %b}' % (field % number))
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert f"{param} must be " in error["message"] and len(error["message"]) < 250
    assert f"got {number.decode()[:50]}" in error["message"]


def test_long_values_are_not_echoed_whole(frontend: FrontendProcess) -> None:
    long = "x" * 100_000
    for fields in ({"n": long}, {"model": long}, {"tools": [{"type": long}]}, {"stop": [[long]]}):
        response = frontend.post(CHAT, **{"messages": USER, **fields})
        assert response.status_code in (400, 404)
        assert len(response.content) < 1000
        assert "xxxxx" in error_of(response)["message"]


LONG = "x" * 50_000
LONG_VALUES = [
    (CHAT, {"messages": [{"role": {"a": LONG}}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
    (COMPLETIONS, {"prompt": PROMPT, "bad_words": [" " * 50_000]}),
    (COMPLETIONS, {"prompt": PROMPT, "structured_outputs": {LONG: 1}}),
    (
        COMPLETIONS,
        {
            "prompt": PROMPT,
            "structured_outputs": {
                "structural_tag": {
                    "structures": [{"begin": LONG, "schema": {}, "end": ""}],
                    "triggers": ["y"],
                }
            },
        },
    ),
    (
        CHAT,
        {
            "messages": USER,
            "tools": [{"function": {"name": f"{i:0>100}"}} for i in range(500)],
            "tool_choice": {"function": {"name": "f"}},
        },
    ),
]


@pytest.mark.parametrize(("path", "fields"), LONG_VALUES)
def test_error_messages_are_short(frontend: FrontendProcess, path: str, fields: dict) -> None:
    response = frontend.post(path, **fields)
    assert response.status_code == 400 and error_of(response)["param"]
    assert len(response.content) < 2000


def test_context_errors_carry_the_code_that_clients_know(frontend: FrontendProcess) -> None:
    response = frontend.post(COMPLETIONS, prompt="word " * 600)
    assert error_of(response)["code"] == "context_length_exceeded"


def test_unknown_model_is_rejected(frontend: FrontendProcess, client: openai.OpenAI) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
        response = frontend.post(path, model="gpt-9", **prompt)
        assert response.status_code == 404
        error = error_of(response)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "gpt-9" in error["message"] and MODEL in error["message"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_unknown_routes_and_methods_are_rejected(frontend: FrontendProcess) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("POST", "/v1/images/generations", 404),
        ("GET", COMPLETIONS, 405),
        ("DELETE", "/v1/models", 405),
    ):
        response = frontend.http.request(method, path)
        assert response.status_code == status
        assert path in error_of(response)["message"]


def test_a_compressed_body_is_rejected_naming_its_encoding(frontend: FrontendProcess) -> None:
    body = gzip.compress(json.dumps({"prompt": PROMPT}).encode())
    for path in (COMPLETIONS, CHAT, "/tokenize"):
        response = frontend.http.post(path, content=body, headers={"content-encoding": "gzip"})
        assert response.status_code == 415 and "gzip" in error_of(response)["message"]
    plain = frontend.http.post(
        COMPLETIONS, json={"prompt": PROMPT}, headers={"content-encoding": "identity"}
    )
    assert plain.status_code == 200


@pytest.mark.slow
def test_each_unknown_field_is_logged_once() -> None:
    with FrontendProcess() as frontend:
        for _ in range(3):
            frontend.complete(PROMPT, max_tokens=1, tempersture=0, repeat_pen=1)
            frontend.complete(PROMPT, max_tokens=1.0, other=2)
        for i in range(300):
            frontend.complete(PROMPT, max_tokens=1, **{f"made_up_{i}": 1})
        for name in ("tempersture", "repeat_pen", "other", "made_up_0"):
            assert frontend.log.count(f'unknown field "{name}"') == 1, frontend.log
        assert frontend.log.count("unknown field") == 100


@pytest.mark.slow
def test_unknown_fields_are_ignored_unless_strict(frontend: FrontendProcess) -> None:
    assert frontend.complete(PROMPT, max_tokens=1, tempersture=0)["choices"]
    with FrontendProcess(strict=True) as strict:
        for path, prompt in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
            response = strict.post(path, tempersture=0, **prompt)
            assert response.status_code == 400
            error = error_of(response)
            assert error["param"] == "tempersture" and "tempersture" in error["message"]
            refused = strict.post(path, lora_path="x", **prompt)
            assert error_of(refused)["param"] == "lora_path"
        known = {"user": "ann", "top_k": 3, "prompt_cache_retention": "24h", "request_id": "r"}
        known |= {"prompt_cache_options": {"ttl": "5m"}, "moderation": {"mode": "x"}}
        assert strict.complete(PROMPT, max_tokens=1, **known)["choices"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": USER}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a" * (2**22 + 1)}, "prompt"),
        ({"messages": [{}]}, "messages[0].role"),
    ],
)
def test_invalid_tokenize_request_is_rejected(
    frontend: FrontendProcess, fields: dict, param: str
) -> None:
    response = frontend.post("/tokenize", **fields)
    assert response.status_code == 400 and error_of(response)["param"] == param


@pytest.mark.parametrize(
    ("tokens", "param"), [(None, "tokens"), ([-1], "tokens[0]"), ([1, 10**7], "tokens[1]")]
)
def test_invalid_detokenize_request_is_rejected(
    frontend: FrontendProcess, tokens: object, param: str
) -> None:
    response = frontend.post("/detokenize", tokens=tokens)
    assert response.status_code == 400 and error_of(response)["param"] == param


@pytest.mark.slow
def test_chat_template_errors_are_client_errors() -> None:
    template = "{{ raise_exception('only users may speak') }}"
    with FrontendProcess(chat_template=template) as frontend:
        response = frontend.post(CHAT, messages=USER)
        assert response.status_code == 400
        assert "only users may speak" in error_of(response)["message"]


@pytest.mark.slow
def test_body_over_the_limit_is_rejected() -> None:
    with FrontendProcess(max_body_bytes=10_000) as frontend:
        body = json.dumps({"prompt": "x" * 20_000}).encode()
        response = frontend.http.post(COMPLETIONS, content=body)
        assert response.status_code == 413
        assert "10000 bytes" in error_of(response)["message"]
        pieces = (b"x" * 1000 for _ in range(1000))
        chunked = frontend.http.post(COMPLETIONS, content=pieces)
        assert chunked.status_code == 413
        assert frontend.complete(PROMPT, max_tokens=1)["choices"]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "status"), [(COMPLETIONS, 413), ("/nowhere", 404)])
def test_a_client_that_sends_its_whole_body_first_reads_the_rejection(
    path: str, status: int
) -> None:
    """The client of `urllib` closes its end after one exchange and does not look for an early answer."""
    with FrontendProcess(max_body_bytes=10_000) as frontend:
        url = f"http://127.0.0.1:{frontend.port}{path}"
        with pytest.raises(urllib.error.HTTPError) as refused:
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(url, b"x" * (20 << 20), headers)
            urllib.request.urlopen(request, timeout=20)
        with refused.value as response:
            assert response.code == status
            assert json.loads(response.read())["error"]["message"]
        goes_on(frontend)


def test_a_client_with_expect_100_is_rejected_before_its_body(frontend: FrontendProcess) -> None:
    with socket.create_connection(("127.0.0.1", frontend.port), timeout=2) as connection:
        head = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n"
        connection.sendall(head.format(COMPLETIONS, 1 << 40).encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
