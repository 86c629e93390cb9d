"""Bodies that are large before or after decoding are bounded and delay no other request."""

from __future__ import annotations

import base64
import re
import socket
from typing import Any

import httpx
import psutil
import pytest
from engine.frontend.api.bodies.structure import BodyStructure
from engine.frontend.http.errors import APIError
from support.media.pdf import write_pdf
from support.processes.program import wait_until
from support.requests.longest_wait import assert_delays_nobody
from support.servers.frontend_process import FrontendProcess

pytestmark = pytest.mark.slow

MIB = 1 << 20


def peak_memory(frontend: FrontendProcess) -> int:
    """Return the peak resident memory of the process in bytes."""
    with open(f"/proc/{frontend.process.pid}/status") as status:
        [line] = [line for line in status if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def filled(prefix: bytes, element: bytes, suffix: bytes, size: int = 8 * MIB) -> bytes:
    return prefix + element * (size // len(element)) + suffix


ATTACKS = {
    "floats for token ids": filled(b'{"prompt":[', b"0.5,", b"1]}"),
    "token ids": filled(b'{"prompt":[', b"12345,", b"1]}"),
    "many lists of token ids": filled(
        b'{"prompt":[', b"[%b]," % b",".join([b"7"] * 3900), b"[1]]}"
    ),
    "unknown fields": b"{%b}" % b",".join(b'"field%d":1' % i for i in range(500_000)),
    "an ignored field": filled(b'{"prompt":"a","metadata":{"a":[', b"{},", b"1]}}"),
    "strings": filled(b'{"prompt":"a","metadata":{"a":[', b'"",', b"1]}}"),
    "escapes": filled(b'{"prompt":"', b'\\"\\\\', b'",1:2}'),
    "nesting": filled(b'{"prompt":', b"[", b"1"),
    "one long string among integers": b'{"prompt":[%b]}'
    % b",".join([b"1", b'"%b"' % (b"a" * 4000), *[b"1"] * 60_000]),
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/detokenize"])
@pytest.mark.parametrize("name", ATTACKS)
def test_a_body_of_too_many_elements_is_rejected_without_delaying_others(
    frontend: FrontendProcess, name: str, path: str
) -> None:
    body = ATTACKS[name]
    if path == "/detokenize":
        body = body.replace(b'"prompt"', b'"tokens"')
    before = peak_memory(frontend)
    answer = assert_delays_nobody(
        str(frontend.http.base_url),
        [frontend.process.pid],
        lambda: frontend.http.post(path, content=body),
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    assert len(answer.content) < 2000
    assert peak_memory(frontend) - before < 64 * MIB


def test_large_bodies_of_few_elements_are_served(frontend: FrontendProcess) -> None:
    fields: dict[str, Any] = {
        "metadata": {"note": 'a "quoted" \\ text, [with] {brackets}' * 100_000}
    }
    assert frontend.complete([10, 11], max_tokens=1, **fields)["choices"]


def test_very_long_texts_are_tokenized_like_short_ones(frontend: FrontendProcess) -> None:
    for text in ("я" * 1_100_000 + " end", "a" * 1_100_000 + "\n😀 end"):
        [choice] = frontend.complete(
            text, max_tokens=1, truncate_prompt_tokens=1, echo=True, return_token_ids=True
        )["choices"]
        assert choice["prompt_token_ids"] == frontend.tokenizer.encode(" end")
        for content in (text, [{"type": "text", "text": text}]):
            messages = [{"role": "user", "content": content}]
            answer = frontend.post("/v1/chat/completions", messages=messages)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_long_texts_anywhere_in_a_chat_are_refused_before_rendering(
    frontend: FrontendProcess,
) -> None:
    text = "a" * 5_000_000
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    function = {"name": "f", "description": text, "parameters": {"type": "object"}}
    user = {"role": "user", "content": "a"}
    fields: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": text}]},
        {"messages": [user, {"role": "assistant", "tool_calls": [call]}]},
        {
            "messages": [user],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
        },
        {"messages": [user], "documents": [{"text": text}]},
        {"messages": [user], "chat_template_kwargs": {"note": text}},
    ]
    for each in fields:
        answer = frontend.post("/v1/chat/completions", **each)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == [name for name in each if name != "tool_choice"][-1]
        assert re.match(rf"{error['param']} has 5000\d{{3}} characters, but at", error["message"])


def test_batches_of_half_a_million_token_ids_are_served(frontend: FrontendProcess) -> None:
    prompts = [[i % 100 + 300] * 480 for i in range(1100)]
    answer = frontend.complete(prompts, max_tokens=1, return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == prompts


def test_large_bodies_are_decoded_like_small_ones(frontend: FrontendProcess) -> None:
    note: dict[str, Any] = {"metadata": {"note": "a" * 600_000}, "temperature": 0}
    cases: list[dict[str, Any]] = [
        {"prompt": [300, 301], "n_predict": 2},
        {"prompt": [[300], [301, 302]], "max_tokens": 1},
        {"prompt": ["a", [300]], "max_tokens": 1},
        {"prompt": [], "max_tokens": 1},
        {"prompt": [[300], []], "max_tokens": 1},
        {"prompt": [300, 10**8], "max_tokens": 1},
        {"prompt": [2**70], "max_tokens": 1},
        {"prompt": [300.0], "max_tokens": 1},
        {"prompt": "a", "n_predict": -5},
        {"prompt": "a", "max_tokens": "two"},
        {"prompt": "a", "max_tokens": 1, "chat_template": "a"},
        {"messages": [{"role": "user", "content": "\u00e9\n"}], "max_tokens": 2},
        {"messages": [{"role": "user", "content": "a", "more": 2**70}], "max_tokens": 2},
    ]
    for case in cases:
        small, large = (frontend.post("/invocations", **case, **more) for more in ({}, note))
        assert small.status_code == large.status_code, (case, large.text)
        answers = [small.json(), large.json()]
        for answer in answers:
            for name in ("id", "created"):
                answer.pop(name, None)
        assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["body decoder", "body decoder fork server"])
def test_a_body_is_served_after_its_decoder_is_killed(frontend: FrontendProcess, name: str) -> None:
    large = {"metadata": {"note": "a" * 600_000}}
    assert frontend.complete("a", max_tokens=1, **large)["choices"]
    children = psutil.Process(frontend.process.pid).children(recursive=True)
    [decoder] = [c for c in children if " ".join(c.cmdline()).strip().endswith(name)]
    decoder.kill()
    assert frontend.complete("a", max_tokens=1, **large)["choices"]


@pytest.mark.parametrize("step", [1, 2, 3, 5, 1000])
def test_the_element_count_does_not_depend_on_how_a_body_is_split(step: int) -> None:
    text = rb'{"a\"[": [1, 2, "\\", "\\\"{,", {"b": []}], "c": "]"}'
    structure = BodyStructure(max_values=5)
    for start in range(0, len(text), step):
        structure.count_elements(text[start : start + step])
    with pytest.raises(APIError, match="at most 5 values, got at least 6"):
        structure.count_elements(b",")


@pytest.mark.slow
def test_large_requests_share_a_bounded_memory() -> None:
    limits = {"max_body_bytes": MIB, "max_request_memory": 2 * MIB}
    head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    body = b'{"prompt":"a","max_tokens":1}'
    large = body + b" " * 500_000
    with FrontendProcess(**limits) as frontend:

        def post(content: bytes) -> httpx.Response:
            return frontend.http.post("/v1/completions", content=content)

        for _ in range(100):
            with socket.create_connection(("127.0.0.1", frontend.port)) as slow:
                slow.sendall(head + b"content-length: 1000000\r\n\r\n" + b" " * 900_000)
                answer = post(large)
                if answer.status_code == 200:
                    # The other body had not arrived yet.
                    continue
                assert "--max-request-memory" in answer.json()["error"]["message"]
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                assert post(body).status_code == 200
                break
        else:
            pytest.fail("a large request was never refused")
        wait_until(lambda: post(large).status_code == 200, what="its memory is free again")


def test_texts_of_documents_count_as_memory_until_their_request_ends() -> None:
    """A small body may have a document with much text, because its pages share one text."""
    data = base64.b64encode(write_pdf(["rain " * 400], num_copies=600)).decode()
    part = {"type": "file", "file": {"filename": "rain.pdf", "file_data": data}}
    with FrontendProcess(max_body_bytes=MIB, max_request_memory=2 * MIB) as frontend:

        def ask(num_documents: int) -> httpx.Response:
            messages = [{"role": "user", "content": [part] * num_documents}]
            return frontend.post("/v1/chat/completions", messages=messages, max_tokens=1)

        for _ in range(3):
            refused = ask(2)
            assert refused.status_code == 503, refused.text
            assert "--max-request-memory" in refused.json()["error"]["message"]
            # One document fits, but not in the context of the model.
            assert (ask(1).status_code, ask(1).json()["error"]["param"]) == (400, "messages")
