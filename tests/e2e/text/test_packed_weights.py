"""Packed weights that a server keeps for its next start."""

from pathlib import Path
from typing import Any

import pytest
from support.processes.program import wait_until
from support.servers.server import Server, default_model

REQUEST = {"prompt": "The capital of France is", "max_tokens": 24, "temperature": 0, "logprobs": 1}


def answer(server: Server) -> Any:
    status, body = server.post("/v1/completions", REQUEST)
    assert status == 200, body
    choice = body["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


@pytest.mark.parametrize(
    "flags",
    [(), ("-pp", "2")],
)
def test_restarted_workers_map_the_packed_weights_and_answer_the_same(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    env = {"ENGINE_CACHE": str(tmp_path)}
    num_workers = 2 if "-pp" in flags else 1
    with Server(default_model(), *flags, env=env) as server:
        expected = answer(server)
        packed = tmp_path / "packed"
        wait_until(
            lambda: len(list(packed.glob("*.packed"))) == num_workers, what="the file is written"
        )
        assert "mapped the packed weights" not in server.log
        server.child("worker 0").kill()
        assert answer(server) == expected
        server.wait_for("mapped the packed weights")
    with Server(default_model(), *flags, env=env) as server:
        assert "mapped the packed weights" in server.log
        assert answer(server) == expected
    off = ("--packed-weights-gib", "0")
    with Server(default_model(), *flags, *off, env=env) as server:
        assert "mapped the packed weights" not in server.log
        assert answer(server) == expected
