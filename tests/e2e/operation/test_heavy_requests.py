"""Requests that are small but expensive do not stop a server from serving others."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.processes.faults import environment_with
from support.processes.program import wait_until
from support.requests.longest_wait import assert_delays_nobody
from support.servers.frontend_process import sse_events
from support.servers.server import Server, assert_nothing_is_held, default_model


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    args = ("--device", "null", "--null-step-ms", "1", "--max-model-len", "256")
    args += ("--max-logprobs", "-1")
    with Server(default_model(), *args) as server:
        yield server
        assert server.stop() == 0, server.log


def complete(server: Server, **fields: Any) -> tuple[int, Any]:
    return server.post("/v1/completions", {"prompt": [10, 11, 12], "max_tokens": 2, **fields})


def test_bad_words_of_many_sequences_do_not_crash_the_frontend(server: Server) -> None:
    frontend = server.child("frontend 0")
    words = [f"understand {i:04}" for i in range(1000)]
    status, answer = complete(server, prompt=["a", "b"], n=128, bad_words=words)
    assert status == 200, answer
    assert len(answer["choices"]) == 256
    status, answer = complete(server, prompt=["a"] * 32, n=128, bad_words=words)
    assert status == 400
    assert answer["error"]["param"] == "bad_words"
    assert server.child("frontend 0").pid == frontend.pid
    assert complete(server)[0] == 200


@pytest.mark.parametrize(
    "fields",
    [{"prompt_logprobs": 4000}, {"logprobs": 4000, "max_tokens": 100}],
    ids=["of the prompt", "of the answer"],
)
def test_many_logprobs_do_not_delay_other_requests(server: Server, fields: dict[str, int]) -> None:
    frontend = server.child("frontend 0")
    status, answer = assert_delays_nobody(
        server.url, [frontend.pid], lambda: complete(server, prompt=[5] * 100, **fields)
    )
    assert status == 200, answer
    assert max(map(len, logprobs_of(answer["choices"][0]))) >= 4000
    assert server.child("frontend 0").pid == frontend.pid


@pytest.mark.parametrize(
    "fields",
    [
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"logprobs": 5, "echo": True},
    ],
    ids=["usage", "logprobs"],
)
def test_thousands_of_streamed_sequences_delay_nobody(
    server: Server, fields: dict[str, Any]
) -> None:
    fields = {"prompt": ["a"] * 32, "n": 128, "max_tokens": 8, "stream": True, **fields}
    pids = [server.child("frontend 0").pid]
    status, answer = assert_delays_nobody(server.url, pids, lambda: complete(server, **fields))
    assert status == 200, answer
    events = sse_events(answer)
    assert {choice["index"] for event in events for choice in event["choices"]} == set(range(4096))


def logprobs_of(choice: dict[str, Any]) -> list[dict[str, Any]]:
    return (choice["prompt_logprobs"] or [])[1:] or choice["logprobs"]["top_logprobs"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": -1, "prompt": [5] * 200}, "prompt_logprobs"),
        ({"logprobs": 49152, "stream": True}, "logprobs"),
    ],
    ids=["of the prompt", "streamed"],
)
def test_too_many_logprobs_are_rejected(server: Server, fields: dict[str, Any], param: str) -> None:
    status, answer = complete(server, **fields)
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_requests_over_the_message_limit_are_split_also_for_the_next_core() -> None:
    args = ("--device", "null", "--null-step-ms", "4", "--max-model-len", "512", "-np", "64")
    with Server(default_model(), *args, env=environment_with("small_frames")) as server:
        prompts = [[1000 + number, *range(2000, 2300)] for number in range(16)]
        body = {"prompt": prompts, "n": 64, "seed": 1, "max_tokens": 20, "return_token_ids": True}
        status, undisturbed = server.post("/v1/completions", body)
        assert status == 200, undisturbed
        assert len(undisturbed["choices"]) == 1024
        with ThreadPoolExecutor() as threads:
            answering = threads.submit(server.post, "/v1/completions", body)
            wait_until(
                lambda: server.metric("engine:num_requests_running") > 0, what="they are computed"
            )
            server.child("core 0").kill()
            status, answer = answering.result()
        assert status == 200, answer
        assert answer["choices"] == undisturbed["choices"]
        assert "larger than" not in server.log
        assert_nothing_is_held(server)
        assert server.stop() == 0, server.log
