"""Start, stop, disconnects and crashes, with real processes."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from support.checkpoints.tiny import qwen3_directory
from support.processes.program import Program, has_ended, wait_until
from support.servers.server import Server, default_model

SLOW = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}


def start(tmp_path: Path, *args: str, **env: str) -> Server:
    return Server(default_model(), *args, env={"XDG_RUNTIME_DIR": str(tmp_path), **env})


def open_stream(
    server: Server, **body
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps({**SLOW, **body}),
        {"content-type": "application/json"},
    )
    response = connection.getresponse()
    assert response.status == 200
    response.readline()
    return connection, response


def test_processes_have_titles_and_no_torch(server: Server) -> None:
    for title in ("core 0", "frontend 0", "store", "worker 0"):
        server.child(title)
    assert psutil.Process(server.process.pid).cmdline()[0] == "engine: guardian"
    # A native program computes the model, regardless of earlier requests.
    for process in server.find_children():
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text(), process.cmdline()
    # It runs in every engine, whether or not anything is stored.
    memory = server.child("store").memory_full_info()
    assert memory.uss < 18 * 2**20


def test_an_idle_server_needs_little_memory_besides_its_worker(tmp_path: Path) -> None:
    with start(tmp_path, PYTHONPATH="") as server:
        others = [each for each in server.find_children() if "worker" not in each.cmdline()[0]]
        assert sum(process.memory_full_info().pss for process in others) < 145 * 2**20


@pytest.mark.parametrize("flag", ["--enable-auto-tool-choice", "--tool-call-parser=hermes"])
def test_an_idle_server_that_expects_tools_loads_grammars(flag: str) -> None:
    with Server(default_model(), "--device", "null", flag) as server:
        # Waits until it exists.
        server.child("grammar fork server")
        core = server.child("core 0")
        wait_until(
            lambda: any("llguidance" in each.path for each in core.memory_maps()),
            what="the core has loaded grammars",
        )


def test_a_loaded_checkpoint_is_not_kept_in_memory(server: Server) -> None:
    maps = Path(f"/proc/{server.child('worker 0').pid}/maps").read_text()
    assert ".gguf" not in maps


def test_disconnect_aborts_the_request(server: Server) -> None:
    connection, response = open_stream(server, model="smollm2")
    wait_until(lambda: server.metric("engine:num_requests_running") == 1, what="the request runs")
    response.close()
    connection.close()
    wait_until(lambda: server.metric("engine:num_requests_running") == 0, what="the request ends")
    wait_until(lambda: server.metric("engine:kv_cache_usage_perc") == 0, what="its blocks are free")


def test_drain_finishes_streams_and_leaves_no_process_or_file(tmp_path: Path) -> None:
    with start(tmp_path, "--heartbeat-timeout", "60") as server:
        connection, response = open_stream(server, max_tokens=150)
        with server.suspended_workers():
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.get("/readyz")[0] != 200, what="not ready while draining")
            assert server.post("/v1/completions", {"prompt": "no", "max_tokens": 1})[0] == 503
        rest = response.read().decode()
        connection.close()
        assert rest.rstrip().endswith("data: [DONE]")
        assert '"finish_reason":"length"' in rest.replace(": ", ":")
        assert server.wait() == 0, server.log
        assert all(map(has_ended, server.children))
    assert list(tmp_path.rglob("*")) == []


def test_interrupt_of_an_idle_server_exits_0(tmp_path: Path) -> None:
    with start(tmp_path, "--device", "null") as server:
        assert server.stop(signal.SIGINT) == 0, server.log
    assert list(tmp_path.rglob("*")) == []


def test_interrupt_of_the_first_imports_prints_no_traceback() -> None:
    command = [sys.executable, "-m", "engine.frontend.cli.main", "serve", "--device", "null"]
    # Programs in the background of a script inherit that SIGINT is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    program = Program(command, {"PYTHONPATH": ""})
    signal.signal(signal.SIGINT, before)
    with program:
        maps = Path(f"/proc/{program.process.pid}/maps")
        wait_until(lambda: "msgspec" in maps.read_text(), what="the command is imported")
        assert program.stop(signal.SIGINT) in (0, 130, -signal.SIGINT)
        assert "Traceback" not in program.log


def test_second_signal_does_not_wait_for_streams(tmp_path: Path) -> None:
    with start(tmp_path, "--device", "null", "--null-step-ms", "20") as server:
        connection, response = open_stream(server, max_tokens=8000)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/readyz")[0] != 200, what="draining")
        server.process.send_signal(signal.SIGTERM)
        # This is shorter than the stream, and shorter than a drain waits for it.
        assert server.process.wait(15) == 128 + signal.SIGTERM
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.read()
        connection.close()
        wait_until(lambda: all(map(has_ended, server.children)), what="children end")
    assert list(tmp_path.rglob("*")) == []


def test_answers_end_with_an_error_when_the_engine_exits(tmp_path: Path) -> None:
    with start(tmp_path, "--device", "null", "--max-restarts", "0") as server:
        connection, stream = open_stream(server, max_tokens=8000)
        answers: list[tuple[int, dict]] = []
        body = {"prompt": "Once", "max_tokens": 8000, "ignore_eos": True}
        thread = threading.Thread(
            target=lambda: answers.append(server.post("/v1/completions", body))
        )
        thread.start()
        wait_until(lambda: server.metric("engine:num_requests_running") == 2, what="both run")
        server.child("worker 0").kill()
        *_, error, done = filter(None, stream.read().decode().split("\n\n"))
        connection.close()
        thread.join()
        assert done == "data: [DONE]"
        message = json.loads(error.removeprefix("data: "))["error"]["message"]
        assert "worker 0 was killed by SIGKILL" in message and "Stopping the server" in message
        ((status, answer),) = answers
        assert status == 500 and "Stopping the server" in answer["error"]["message"]
        assert server.wait() == 1
        assert "Stopping the server" in server.log.splitlines()[-1]
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("change", ["weights", "tokenizer", "template"])
def test_a_restarted_worker_rejects_changed_model_files(tmp_path: Path, change: str) -> None:
    model, _ = qwen3_directory(tmp_path / "model")
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    # A process restarted after the change cannot start, and the second crash in a row ends the server.
    args = (str(model), "--max-restarts", "1", "--chat-template", str(template))
    with Server(*args, env={"XDG_RUNTIME_DIR": str(run_dir)}) as server:
        assert server.post("/v1/completions", {"prompt": [5], "max_tokens": 2})[0] == 200
        role, file = {
            "weights": ("worker 0", max(model.glob("*.safetensors"))),
            "tokenizer": ("frontend 0", model / "tokenizer.json"),
            "template": ("frontend 0", template),
        }[change]
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
        # Running processes are not affected.
        assert server.post("/v1/completions", {"prompt": [5], "max_tokens": 2})[0] == 200
        server.child(role).kill()
        assert server.process.wait(60) == 1
        last = server.log.splitlines()[-1]
        assert f"{file}: this file changed after the server started" in last, server.log
        assert "Traceback" not in server.log


def test_a_deleted_run_directory_is_named_when_a_process_cannot_be_replaced(tmp_path: Path) -> None:
    with start(tmp_path, "--device", "null") as server:
        connection, stream = open_stream(server, max_tokens=8000)
        (run_dir,) = tmp_path.iterdir()
        shutil.rmtree(run_dir)
        server.wait_for("was deleted: running processes continue")
        assert server.post("/v1/completions", {"prompt": "Once", "max_tokens": 2})[0] == 200
        server.child("worker 0").kill()
        *_, error, done = filter(None, stream.read().decode().split("\n\n"))
        connection.close()
        assert done == "data: [DONE]" and "was deleted" in error
        assert server.wait() == 1
        last = server.log.splitlines()[-1]
        assert str(run_dir) in last and "was deleted" in last
        assert "Traceback" not in server.log


def test_killed_guardian_leaves_no_process(tmp_path: Path) -> None:
    with start(tmp_path) as server:
        server.process.kill()
        server.process.wait()
        wait_until(lambda: all(map(has_ended, server.children)), what="children end")
        wait_until(lambda: list(tmp_path.rglob("*")) == [], what="the run directory goes")


def run_serve(*args: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "engine.frontend.cli.main", "serve", *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_port_in_use_prints_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, output = run_serve(default_model(), "--port", str(port))
    assert code == 1 and str(port) in output.splitlines()[-1]
    assert "Traceback" not in output


def test_truncated_checkpoint_prints_one_line(tmp_path: Path) -> None:
    whole = Path(default_model()).read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(whole[: len(whole) // 2])
    code, output = run_serve(str(broken), "--port", "0")
    assert code == 1 and "broken.gguf" in output.splitlines()[-1]
    assert "Traceback" not in output


def test_missing_model_prints_one_line() -> None:
    code, output = run_serve("/nonexistent/model", "--port", "0")
    assert code != 0 and "/nonexistent/model" in output.splitlines()[-1]
    assert "Traceback" not in output


def test_large_bodies_and_malformed_json_are_rejected(server: Server) -> None:
    status, body = server.post("/v1/completions", b"x" * (50 * 1024 * 1024))
    assert status == 413 and "error" in body
    status, body = server.post("/v1/completions", b'{"prompt": ')
    assert status == 400 and "error" in body
    assert server.get("/readyz")[0] == 200


def test_slow_reader_does_not_delay_others(server: Server) -> None:
    connection, _ = open_stream(server, model="smollm2", max_tokens=1000)
    done = threading.Event()

    def other() -> None:
        status, _ = server.post(
            "/v1/completions", {"model": "smollm2", "prompt": "Hi", "max_tokens": 16}
        )
        assert status == 200
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    assert done.wait(60)
    thread.join()
    connection.close()
    wait_until(lambda: server.metric("engine:num_requests_running") == 0)


def test_sockets_are_private(server: Server) -> None:
    sockets = [
        c.laddr
        for p in server.children
        for c in p.net_connections("unix")
        if c.laddr and "core" in os.path.basename(c.laddr)
    ]
    assert sockets
    for path in sockets:
        assert Path(path).parent.stat().st_mode & 0o777 == 0o700
