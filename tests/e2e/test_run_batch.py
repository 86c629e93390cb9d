"""`engine run-batch` with its own engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.server import default_model

LINES = [
    {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "One", "max_tokens": 3}},
    {
        "custom_id": "b",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "Two"}], "max_tokens": 2},
    },
    {"custom_id": "c", "url": "/v1/responses", "body": {"input": "Three", "top_p": 9}},
]


def run_batch(tmp_path: Path, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "in.jsonl").write_text(text)
    command = [sys.executable, "-m", "engine.frontend.cli.main", "run-batch", *flags]
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    return subprocess.run([*command, *files], capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_requests_of_a_file_are_answered_in_order(tmp_path: Path) -> None:
    text = "\n".join(map(json.dumps, LINES))
    done = run_batch(tmp_path, text, default_model(), "--device", "null")
    assert done.returncode == 1, done.stderr
    assert "3 requests: 2 answered, 1 failed" in done.stdout + done.stderr
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["a", "b", "c"]
    assert [answer["response"]["status_code"] for answer in answers] == [200, 200, 400]
    assert answers[1]["response"]["body"]["usage"]["completion_tokens"] == 2
    assert answers[2]["response"]["body"]["error"]["param"] == "top_p"


def test_invalid_lines_are_named(tmp_path: Path) -> None:
    done = run_batch(tmp_path, json.dumps(LINES[0]) + "\n{}", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "line 2: Object missing required field" in done.stderr


def test_the_input_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").symlink_to("in.jsonl")
    done = run_batch(tmp_path, json.dumps(LINES[0]), "--url", "http://127.0.0.1:9")
    assert done.returncode == 2
    assert "out.jsonl is the input file" in done.stderr
    assert (tmp_path / "in.jsonl").read_text() == json.dumps(LINES[0])
