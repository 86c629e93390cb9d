"""The programs in `examples/` run as described in their README."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers.server import Server, default_model

EXAMPLES = Path(__file__).parents[3] / "examples"

EXPECTED = {
    "chat": "force",
    "streaming": "tokens]",
    "json_schema": "people",
    "tools": "get_weather({'city': ",
    "batch": "2 ",
    "slow_request": "request",
}
"""A part of what each program prints with the default model, greedily."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    dumps = tmp_path_factory.mktemp("dumps")
    with Server(default_model(), "--max-model-len", "2048", "--dump-dir", str(dumps)) as s:
        yield s


def run(program: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{program}.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("program", EXPECTED)
def test_an_example_runs_against_a_server(program: str, server: Server) -> None:
    assert EXPECTED[program] in run(program, ENGINE_URL=server.url, COUNT="4")


def test_the_offline_example_runs_without_a_server() -> None:
    assert "Paris" in run("offline")


def test_the_fastapi_example_answers_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi.testclient import TestClient

    monkeypatch.syspath_prepend(str(EXAMPLES))
    import fastapi_app

    with TestClient(fastapi_app.app) as client:
        answer = client.get("/summary", params={"topic": "the moon"})
        assert answer.status_code == 200
        assert answer.json()["summary"]


def test_every_example_is_in_the_readme() -> None:
    readme = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"`{path.name}`" in readme
