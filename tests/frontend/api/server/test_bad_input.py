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
from support.requests.bad_fields import BAD_FIELDS, CHAT_ONLY, COMPLETION_ONLY, PROMPT, USER
from support.servers.frontend_process import MODEL, FrontendProcess

pytestmark = pytest.mark.slow

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def error_of(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert error.keys() - {"n_prompt_tokens", "n_ctx"} == {"message", "type", "param", "code"}
    assert error["message"]
    assert response.headers["x-request-id"]
    return error


def goes_on(frontend: FrontendProcess) -> None:
    assert frontend.http.get("/health").status_code == 200
    assert frontend.complete(PROMPT, max_tokens=1)["choices"][0]["text"] == "One"


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


@pytest.mark.parametrize("depth", [*range(950, 1000, 2), 100_000])
def test_json_in_strings_nested_too_deeply_is_rejected(
    frontend: FrontendProcess, depth: int
) -> None:
    """At any excessive depth, the error names the field and nothing is logged."""
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
        if response.status_code != 200 or depth == 100_000:
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
    for path, name in ((COMPLETIONS, "prompt"), ("/completion", "prompt"), ("/generate", "text")):
        error = error_of(frontend.post(path, **{name: "word " * 600}))
        assert error["code"] == "context_length_exceeded"
        # llama.cpp's clients read these.
        assert (error["type"], error["n_ctx"]) == ("exceed_context_size_error", 512)
        assert error["n_prompt_tokens"] == len(frontend.tokenizer.encode("word " * 600))
        assert error["param"] == name


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
    for method, path, form, status in (
        ("GET", "/nowhere", None, 404),
        ("POST", "/v1/images/generations", None, 404),
        ("POST", "/v1/images/edits", {"image": b"x"}, 404),
        ("GET", COMPLETIONS, None, 405),
        ("DELETE", "/v1/models", None, 405),
    ):
        response = frontend.http.request(method, path, files=form)
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
            refused = strict.post(path, custom_params={"a": 1}, **prompt)
            assert error_of(refused)["param"] == "custom_params"
        known = {"user": "ann", "top_k": 3, "prompt_cache_retention": "24h", "request_id": "r"}
        known |= {"prompt_cache_options": {"ttl": "5m"}, "session_id": "s"}
        assert strict.complete(PROMPT, max_tokens=1, **known)["choices"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": USER}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": ["a" * 2**21] * 3}, "prompt"),
        ({"prompt": "a" * (2**22 + 1)}, "prompt"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": USER, "media_io_kwargs": {"image": {}}}, "media_io_kwargs"),
        ({"messages": USER, "tools": [{"function": None}]}, "tools[0].function"),
        ({"messages": USER, "media_io_kwargs": {"video": 1}}, "media_io_kwargs.video"),
        (
            {"messages": USER, "mm_processor_kwargs": {"use_audio_in_video": 1}},
            "mm_processor_kwargs.use_audio_in_video",
        ),
        ({"messages": USER, "mm_processor_kwargs": {"fps": 0}}, "mm_processor_kwargs.fps"),
        ({"messages": USER, "mm_processor_kwargs": {"size": 1}}, "mm_processor_kwargs"),
        ({"messages": USER, "mm_processor_kwargs": {"size": {"a": 1}}}, "mm_processor_kwargs.size"),
        (
            {"messages": USER, "mm_processor_kwargs": {"max_pixels": 0}},
            "mm_processor_kwargs.max_pixels",
        ),
        (
            {"messages": USER, "mm_processor_kwargs": {"images_kwargs": 1}},
            "mm_processor_kwargs.images_kwargs",
        ),
    ],
)
def test_invalid_tokenize_request_is_rejected(
    frontend: FrontendProcess, fields: dict, param: str
) -> None:
    response = frontend.post("/tokenize", **fields)
    assert response.status_code == 400 and error_of(response)["param"] == param


@pytest.mark.parametrize(
    ("tokens", "param"),
    [(None, "tokens"), ([-1], "tokens[0]"), ([1, 10**7], "tokens[1]"), ([[1], 2], "tokens[1]")],
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
    with socket.create_connection(("127.0.0.1", frontend.port), timeout=20) as connection:
        head = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n"
        connection.sendall(head.format(COMPLETIONS, 1 << 40).encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
