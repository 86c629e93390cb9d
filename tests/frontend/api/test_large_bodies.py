"""Bodies that are large, or large once they are decoded: bounded, and nobody else waits for them."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from engine.frontend.api.bodies.structure import BodyStructure
from engine.frontend.http.errors import APIError
from support.frontend_process import FrontendProcess
from support.longest_wait import longest_wait
from support.program import wait_until

MIB = 1 << 20


def peak_memory(frontend: FrontendProcess) -> int:
    """The most memory that the process has ever had resident, in bytes."""
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
def test_a_body_of_too_many_elements_is_refused_and_delays_nobody(
    frontend: FrontendProcess, name: str, path: str
) -> None:
    body = ATTACKS[name]
    if path == "/detokenize":
        body = body.replace(b'"prompt"', b'"tokens"')
    before = peak_memory(frontend)
    with longest_wait(str(frontend.http.base_url)) as waits:
        answer = frontend.http.post(path, content=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    assert len(answer.content) < 2000
    assert peak_memory(frontend) - before < 64 * MIB
    assert waits[0] < 1.0


def test_large_bodies_of_few_elements_are_served(frontend: FrontendProcess) -> None:
    fields: dict[str, Any] = {
        "metadata": {"note": 'a "quoted" \\ text, [with] {brackets}' * 100_000}
    }
    assert frontend.complete([10, 11], max_tokens=1, **fields)["choices"]


def test_batches_of_half_a_million_token_ids_are_served(frontend: FrontendProcess) -> None:
    prompts = [[i % 100 + 300] * 480 for i in range(1100)]
    answer = frontend.complete(prompts, max_tokens=1, return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == prompts


def test_large_bodies_are_decoded_as_small_ones_are(frontend: FrontendProcess) -> None:
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


def test_a_body_that_ends_its_decoder_costs_one_request(frontend: FrontendProcess) -> None:
    large = {"metadata": {"note": "a" * 600_000}}
    assert frontend.complete("a", max_tokens=1, **large)["choices"]
    children = psutil.Process(frontend.process.pid).children()
    [decoder] = [child for child in children if "body decoder" in " ".join(child.cmdline())]
    with ThreadPoolExecutor(1) as threads:
        decoder.suspend()
        lost = threads.submit(frontend.post, "/v1/completions", prompt="a", **large)
        wait_until(lambda: not lost.done(), what="the request is on its way")
        decoder.kill()
        assert lost.result().status_code in (200, 400)
    assert frontend.complete("a", max_tokens=1, **large)["choices"]


@pytest.mark.parametrize("step", [1, 2, 3, 5, 1000])
def test_elements_are_counted_the_same_however_a_body_is_cut(step: int) -> None:
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
