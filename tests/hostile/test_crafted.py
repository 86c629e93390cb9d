"""Requests that are small or well formed, but expensive to serve."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import pytest
from support.hostile.client import make_request
from support.hostile.target import Attack, Target

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"

Json = dict[str, Any]
MakeBody = Callable[[], Json | bytes]


def completion(**fields: Any) -> Json:
    return {"prompt": "Hi", "max_tokens": 2, **fields}


def chat(**fields: Any) -> Json:
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **fields}


def tool(name: str, **properties: Any) -> Json:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def schema_chat(schema: Any) -> Json:
    return chat(
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    )


def in_depth(levels: int, wrap: Callable[[Any], Any], inner: Any) -> Any:
    for _ in range(levels):
        inner = wrap(inner)
    return inner


def chain(levels: int, key: str) -> Json:
    """Return a schema of definitions, each of which refers to the next."""
    definitions: Json = {
        f"d{level}": {key: [{"$ref": f"#/$defs/d{level + 1}"}]}
        if key != "$ref"
        else {"$ref": f"#/$defs/d{level + 1}"}
        for level in range(levels)
    }
    definitions[f"d{levels}"] = {"type": "string"}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def nested_text(opening: str, inner: str, closing: str, levels: int) -> bytes:
    return (opening * levels + inner + closing * levels).encode()


GRAMMARS: Final[dict[str, MakeBody]] = {
    "5,000 parentheses": lambda: completion(grammar="root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    "left recursion": lambda: completion(grammar='root ::= root root root | "a" | ""'),
    "rules without an end": lambda: completion(grammar="root ::= a\na ::= b\nb ::= a"),
    "repetition of repetition": lambda: completion(
        grammar='root ::= a{1,9999}\na ::= b{1,9999}\nb ::= [a-z]{1,9999} "x"'
    ),
    "20,000 alternatives": lambda: completion(
        grammar="root ::= " + " | ".join(f'"w{number}"' for number in range(20_000))
    ),
    "regex of 3,000 groups": lambda: completion(regex="(" * 3000 + "a" + ")" * 3000),
    "regex of nested counts": lambda: completion(regex="((((a{1,50}){1,50}){1,50}){1,50}){1,50}"),
    "regex of wide counts": lambda: completion(regex=r"(\p{L}|\d|[^\x00-\x7f]){1,50000}x"),
    "regex of stars": lambda: completion(regex="(a*)*" * 2000 + "b"),
    "regex with a lookahead": lambda: completion(regex=r"(?=.*a)(?!b)\1"),
    "regex of 300,000 letters": lambda: completion(regex="a" * 300_000),
    "a choice of 400,000 letters": lambda: completion(
        structured_outputs={"choice": ["a" * 400_000, "b"]}
    ),
}

SCHEMAS: Final[dict[str, MakeBody]] = {
    "minProperties of 1,000 properties": lambda: schema_chat(
        {
            "type": "object",
            "properties": {f"p{number}": {"type": "string"} for number in range(1000)},
            "minProperties": 500,
            "additionalProperties": False,
        }
    ),
    "maxProperties of 1,000 properties": lambda: schema_chat(
        {
            "type": "object",
            "properties": {f"p{number}": {"type": "string"} for number in range(1000)},
            "maxProperties": 500,
        }
    ),
    "anyOf of itself": lambda: schema_chat(
        {
            "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 1000 + [{"type": "null"}]}},
            "$ref": "#/$defs/a",
        }
    ),
    "anyOf of itself, in pairs": lambda: schema_chat(
        {
            "$defs": {
                f"d{level}": {
                    "anyOf": [{"$ref": f"#/$defs/d{other}"} for other in range(40)]
                    + [{"type": "array", "items": {"$ref": "#/$defs/d0"}}]
                }
                for level in range(40)
            },
            "$ref": "#/$defs/d0",
        }
    ),
    "a reference to itself": lambda: schema_chat({"$ref": "#"}),
    "two references to each other": lambda: schema_chat(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "a chain of 900 references": lambda: schema_chat(chain(900, "$ref")),
    "a chain of 5,000 references": lambda: schema_chat(chain(5000, "$ref")),
    "a chain of 5,000 anyOf": lambda: schema_chat(chain(5000, "anyOf")),
    "a chain of 5,000 allOf": lambda: schema_chat(chain(5000, "allOf")),
    "a chain of 5,000 oneOf": lambda: schema_chat(chain(5000, "oneOf")),
    "500 levels of items": lambda: schema_chat(
        in_depth(500, lambda inner: {"type": "array", "items": inner}, {"type": "string"})
    ),
    "3,600 levels of items": lambda: (
        b'{"max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}], "response_format": '
        b'{"type": "json_schema", "json_schema": {"name": "n", "schema": '
        + nested_text('{"items": ', "{}", "}", 3600)
        + b"}}}"
    ),
    "3,600 levels of properties": lambda: (
        b'{"max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}], "response_format": '
        b'{"type": "json_schema", "json_schema": {"name": "n", "schema": '
        + nested_text('{"properties": {"a": ', "{}", "}}", 3600)
        + b"}}}"
    ),
    "200,000 levels of not": lambda: (
        b'{"max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}], "response_format": '
        b'{"type": "json_schema", "json_schema": {"name": "n", "schema": '
        + nested_text('{"not": ', "{}", "}", 200_000)
        + b"}}}"
    ),
    "20,000 properties": lambda: schema_chat(
        {
            "type": "object",
            "properties": {f"p{number}": {"type": "integer"} for number in range(20_000)},
        }
    ),
    "an enum of 100,000": lambda: schema_chat({"enum": list(range(100_000))}),
    "an enum of one text of 300 KB": lambda: schema_chat({"enum": ["a" * 300_000]}),
    "a long range of numbers": lambda: schema_chat(
        {"type": "number", "minimum": 1.23456789e-300, "maximum": 1.9876543e300}
    ),
    "a multiple of very little": lambda: schema_chat({"type": "number", "multipleOf": 1e-300}),
    "minItems of a billion": lambda: schema_chat({"type": "array", "minItems": 10**9}),
    "minLength of a billion": lambda: schema_chat({"type": "string", "minLength": 10**9}),
    "a pattern of nested counts": lambda: schema_chat(
        {"type": "string", "pattern": "^((a{1,99}){1,99}){1,99}$"}
    ),
    "5,000 patterns": lambda: schema_chat(
        {
            "type": "object",
            "patternProperties": {f"^p{number}.*$": {"type": "null"} for number in range(5000)},
        }
    ),
    "300 patterns that meet": lambda: schema_chat(
        {"allOf": [{"type": "string", "pattern": f"a.*b{number}.*c"} for number in range(300)]}
    ),
    "prefixItems of 20,000": lambda: schema_chat(
        {"type": "array", "prefixItems": [{"type": "integer"}] * 20_000}
    ),
    "x-guidance of a web page": lambda: schema_chat(
        {"x-guidance": {"whitespace_pattern": "(a*)*" * 1000, "item_separator": "x" * 100_000}}
    ),
    "a reference to the web": lambda: schema_chat({"$ref": "http://127.0.0.1:9/schema.json"}),
    "a reference to a file": lambda: schema_chat({"$ref": "file:///etc/passwd"}),
    "a reference to a number": lambda: schema_chat({"$ref": 5, "$defs": 7}),
    "a type that is none": lambda: schema_chat({"type": "wrong"}),
    "10,000 types": lambda: schema_chat({"type": ["string"] * 10_000}),
}

TOOLS: Final[dict[str, MakeBody]] = {
    "20,000 tools": lambda: chat(
        tools=[tool(f"f{number}") for number in range(20_000)], tool_choice="required"
    ),
    "20,000 tools for choice": lambda: chat(tools=[tool(f"f{number}") for number in range(20_000)]),
    "500 tools of 40 properties": lambda: chat(
        tools=[
            tool(f"f{number}", **{f"p{index}": {"type": "string"} for index in range(40)})
            for number in range(500)
        ],
        tool_choice="required",
    ),
    "one tool 5,000 times": lambda: chat(tools=[tool("f")] * 5000, tool_choice="required"),
    "a name of 100,000 letters": lambda: chat(tools=[tool("f" * 100_000)], tool_choice="required"),
    "a tool choice of 100,000 letters": lambda: chat(
        tools=[tool("f")], tool_choice={"type": "function", "function": {"name": "g" * 100_000}}
    ),
    "arguments of 1 MB of brackets": lambda: chat(
        messages=[
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "1",
                        "type": "function",
                        "function": {"name": "f", "arguments": "[" * 1_000_000},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ]
    ),
    "20,000 calls in the history": lambda: chat(
        messages=[
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": f"{number}",
                        "type": "function",
                        "function": {"name": "f", "arguments": "{}"},
                    }
                    for number in range(20_000)
                ],
            },
        ]
    ),
    "100,000 messages": lambda: chat(messages=[{"role": "user", "content": "a"}] * 100_000),
    "100,000 parts": lambda: chat(
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 100_000}]
    ),
    "a role of 1 MB": lambda: chat(messages=[{"role": "r" * 1_000_000, "content": "a"}]),
    "100,000 documents": lambda: chat(documents=[{"text": "a"}] * 100_000),
    "template arguments that replace its own": lambda: chat(
        chat_template_kwargs={"messages": [{"role": "x" * 10**6}], "range": 1, "raise_exception": 1}
    ),
    "100,000 template arguments": lambda: chat(
        chat_template_kwargs={f"k{number}": number for number in range(100_000)}
    ),
}

SAMPLING: Final[dict[str, MakeBody]] = {
    "log-probabilities of the whole prompt": lambda: completion(
        prompt=[5] * 400, prompt_logprobs=-1
    ),
    "all log-probabilities of 5 tokens": lambda: completion(logprobs=49_152, max_tokens=5),
    "all log-probabilities of a chat": lambda: chat(
        logprobs=True, top_logprobs=49_152, max_tokens=20
    ),
    "all log-probabilities of a stream": lambda: completion(
        logprobs=49_152, max_tokens=20, stream=True
    ),
    "all log-probabilities of an echo": lambda: completion(
        prompt="Hi " * 300, echo=True, logprobs=20_000
    ),
    "100,000 stop strings": lambda: completion(stop=[f"s{number}" for number in range(100_000)]),
    "a stop string of 400,000 letters": lambda: completion(stop="a" * 400_000, max_tokens=100),
    "a stop string that nearly matches": lambda: completion(
        stop=["a" * 200_000 + "b"] * 2, max_tokens=100
    ),
    "4 stop strings of 100,000 letters in a stream": lambda: completion(
        stop=[letter * 100_000 for letter in "abcd"], max_tokens=100, stream=True
    ),
    "100,000 bad words": lambda: completion(bad_words=[f"w{number}" for number in range(100_000)]),
    "a bad word of 400,000 letters": lambda: completion(bad_words=["a" * 400_000]),
    "a bias for every token": lambda: completion(logit_bias={str(t): 1 for t in range(49_152)}),
    "a million biases": lambda: completion(logit_bias={str(t): 1 for t in range(1_000_000)}),
    "a bias with an odd key": lambda: completion(logit_bias={"\u0661": 1, "1_0": 2, " 3": 4}),
    "a million allowed tokens": lambda: completion(allowed_token_ids=[1] * 1_000_000),
    "a million stop tokens": lambda: completion(stop_token_ids=list(range(1_000_000))),
    "n of a million": lambda: completion(n=1_000_000),
    "n of 2,000": lambda: completion(n=2000, max_tokens=1),
    "2,000 prompts of n 128": lambda: completion(prompt=["a"] * 2000, n=128, max_tokens=1),
    "100,000 prompts": lambda: completion(prompt=["a"] * 100_000),
    "a prompt of 1 MB": lambda: completion(prompt="hello " * 170_000),
    "a prompt of 1 MB of one letter": lambda: completion(prompt="a" * 1_000_000),
    "a prompt of 1 MB of white space": lambda: completion(prompt=" " * 1_000_000),
    "a prompt of 1 MB of digits": lambda: completion(prompt="1" * 1_000_000),
    "a prompt of 100,000 emoji": lambda: completion(prompt="\U0001f468‍\U0001f469" * 50_000),
    "a prompt of 100,000 accents": lambda: completion(prompt="a" + "\u0301" * 100_000),
    "a prompt to be cut": lambda: completion(prompt="hello " * 170_000, truncate_prompt_tokens=5),
    "integers around a text of 120 KB": lambda: completion(
        prompt=[1, "a" * 120_000, 1, *[1] * 2000]
    ),
    "token ids around a text of 120 KB": lambda: completion(
        stop_token_ids=[1, "a" * 120_000, *[1] * 2000]
    ),
    "lists of tokens with a text": lambda: completion(prompt=[[1, "a" * 120_000] + [1] * 2000] * 3),
    "2,000 lists of 200 tokens": lambda: completion(prompt=[[5] * 200] * 2000),
    "a salt of 1 MB": lambda: completion(cache_salt="s" * 1_000_000),
    "a user of 1 MB": lambda: completion(user="u" * 1_000_000),
    "a million unknown fields": lambda: (
        b'{"prompt": "Hi", "max_tokens": 1, '
        + b", ".join(b'"u%d": 0' % number for number in range(1_000_000))
        + b"}"
    ),
    "one field 1,000,000 times": lambda: (
        b'{"prompt": "Hi", ' + b'"max_tokens": 1, ' * 1_000_000 + b'"n": 1}'
    ),
    "28 MB of floats that nobody reads": lambda: (
        b'{"prompt": "Hi", "max_tokens": 1, "unknown": [' + b"0.25," * 5_600_000 + b"1]}"
    ),
    "28 MB of blanks": lambda: b'{"prompt": "Hi", "max_tokens": 1' + b" " * 28_000_000 + b"}",
    "12 MB of float token ids": lambda: b'{"prompt": [' + b"5.0," * 3_000_000 + b"5.0]}",
    "16 MB of float token lists": lambda: (
        b'{"prompt": [' + b",".join([b"[" + b"1," * 3899 + b"1]"] * 2000) + b"]}"
    ),
}

OTHER: Final[list[tuple[str, str, MakeBody]]] = [
    ("/tokenize", "10 MB", lambda: {"prompt": "hello " * 1_700_000}),
    ("/tokenize", "10 MB of one letter", lambda: {"prompt": "a" * 10_000_000}),
    (
        "/tokenize",
        "1 MB with its tokens' texts",
        lambda: {"prompt": "hello " * 170_000, "return_token_strs": True},
    ),
    ("/detokenize", "1,000,000 tokens", lambda: {"tokens": [5] * 1_000_000}),
    (
        "/detokenize",
        "12 MB of float tokens",
        lambda: b'{"tokens": [' + b"5.0," * 3_000_000 + b"5]}",
    ),
    ("/detokenize", "a text between", lambda: {"tokens": [1, "a" * 120_000, *[1] * 2000]}),
]


def crafted() -> Iterator[tuple[str, str, MakeBody]]:
    for bodies in (GRAMMARS, SCHEMAS, TOOLS, SAMPLING):
        for name, make_body in bodies.items():
            yield CHAT if bodies in (SCHEMAS, TOOLS) else COMPLETIONS, name, make_body
    yield from OTHER


def request_of(path: str, make_body: MakeBody) -> bytes:
    body = make_body()
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return make_request("POST", path, text)


@pytest.mark.parametrize(
    "path, name, make_body", crafted(), ids=[f"{path} {name}" for path, name, _ in crafted()]
)
def test_crafted_bodies_do_not_harm_the_server(
    target: Target, path: str, name: str, make_body: MakeBody
) -> None:
    attack = Attack(f"{path} {name}", partial(request_of, path, make_body))
    faults = target.find_faults([attack])
    assert not faults, faults
