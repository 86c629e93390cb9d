"""`engine run-batch` with its own engine."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from support.servers.server import default_model

LINES = [
    {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "One", "max_tokens": 3}},
    {
        "custom_id": "b",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "Two"}], "max_tokens": 2},
    },
    {"custom_id": "c", "url": "/v1/responses", "body": {"input": "Three", "top_p": 9}},
]


def run_batch(given: str, written: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine.frontend.cli.main", "run-batch", *flags]
    files = ["-i", given, "-o", written]
    return subprocess.run([*command, *files], capture_output=True, text=True, timeout=100)


def run_text(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "in.jsonl").write_text(text)
    files = str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")
    return run_batch(*files, "--url", "http://127.0.0.1:9")


class _Files(BaseHTTPRequestHandler):
    """Returns the requests, and keeps what is written."""

    written: ClassVar[list[bytes]] = []

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write("\n".join(map(json.dumps, LINES)).encode())

    def do_PUT(self) -> None:
        self.written.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()


@pytest.mark.slow
def test_requests_of_a_url_are_answered_in_order() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Files) as files:
        threading.Thread(target=files.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{files.server_port}"
        done = run_batch(url, url, default_model(), "--device", "null")
        files.shutdown()
    assert done.returncode == 1, done.stderr
    assert "3 requests: 2 answered, 1 failed" in done.stdout + done.stderr
    answers = [json.loads(line) for line in _Files.written[0].splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["a", "b", "c"]
    assert [answer["response"]["status_code"] for answer in answers] == [200, 200, 400]
    assert answers[1]["response"]["body"]["usage"]["completion_tokens"] == 2
    assert answers[2]["response"]["body"]["error"]["param"] == "top_p"


def test_invalid_lines_are_named(tmp_path: Path) -> None:
    done = run_text(tmp_path, json.dumps(LINES[0]) + "\n{}")
    assert done.returncode == 1
    assert "line 2: Object missing required field" in done.stderr


def test_the_input_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").symlink_to("in.jsonl")
    done = run_text(tmp_path, json.dumps(LINES[0]))
    assert done.returncode == 2
    assert "out.jsonl is the input file" in done.stderr
    assert (tmp_path / "in.jsonl").read_text() == json.dumps(LINES[0])


def test_file_without_requests_has_no_answers(tmp_path: Path) -> None:
    done = run_text(tmp_path, "\n")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.jsonl").read_text() == ""
