"""A request that crashes its frontend is rejected from then on, and the server keeps serving."""

from __future__ import annotations

import urllib.error
from http.client import HTTPException
from typing import Any

import pytest
from support.processes.faults import environment_with
from support.processes.program import wait_until
from support.servers.server import Server, default_model

GOOD = {"prompt": [5, 6], "max_tokens": 2}


def post_until_answered(server: Server, body: dict[str, Any]) -> tuple[int, Any]:
    """Return the answer for a client that retries after every lost connection."""
    answer: list[tuple[int, Any]] = []

    def has_answer() -> bool:
        try:
            answer.append(server.post("/v1/completions", body))
        except (urllib.error.URLError, HTTPException, ConnectionError):
            return False
        return True

    wait_until(has_answer, 60, what="an answer")
    return answer[0]


def test_bodies_that_crash_their_frontend_are_rejected_and_the_server_continues() -> None:
    args = ("--device", "null", "--max-restarts", "1")
    with Server(default_model(), *args, env=environment_with("crashing_parser")) as server:
        for number in range(4):
            poison = {"prompt": f"crash the parser {number}", "max_tokens": 2}
            with pytest.raises((urllib.error.URLError, HTTPException, ConnectionError)):
                server.post("/v1/completions", poison)
            frontend = server.child("frontend 0").pid
            status, answer = post_until_answered(server, poison)
            assert status == 500, answer
            assert "crashed while parsing this request" in answer["error"]["message"]
            assert server.post("/v1/completions", GOOD)[0] == 200
            assert server.child("frontend 0").pid == frontend
        assert "Stopping the server" not in server.log
        assert server.stop() == 0, server.log
