"""Requests that are small to send and large to serve do not keep a server from serving."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.server import Server, default_model


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    args = ("--device", "null", "--null-step-ms", "1", "--max-model-len", "256")
    with Server(default_model(), *args) as server:
        yield server
        assert server.stop() == 0, server.log


def complete(server: Server, **fields: Any) -> tuple[int, Any]:
    return server.post("/v1/completions", {"prompt": [10, 11, 12], "max_tokens": 2, **fields})


def test_bad_words_of_many_sequences_do_not_cost_the_frontend_its_life(server: Server) -> None:
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
