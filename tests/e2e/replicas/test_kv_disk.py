"""Blocks of the KV cache, and outputs of encoders, on disk outlive all processes."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import psutil
import pytest
from engine.workers.kv_transfer.disk.segment_format import HEADER_BYTES, SegmentFormat
from support.processes.program import wait_until
from support.servers.server import DEVICE, Server, assert_nothing_is_held, default_model
from support.vision.models import Model

PROMPTS = [f"{name} once upon a time. " * 20 for name in ("Anna", "Bert", "Cleo")]

DTYPES = {"native": "bfloat16", "torch": "float32"}
"""In bfloat16, torch's numbers depend on how many tokens of a prompt are computed together."""

BLOCK_BYTES = 2 * 2 * 30 * 3 * 64 * 16
"""Keys and values of 30 layers with 3 heads of 64 elements, in bfloat16, of 16 tokens."""


def ask(server: Server, prompt: str) -> tuple[str, int]:
    """Return the answer, and how many tokens of the prompt were cached."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def kill_all(server: Server) -> None:
    for victim in [*server.find_children(), psutil.Process(server.process.pid)]:
        victim.kill()
    server.process.wait()


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_prompts_are_found_on_disk_after_all_processes_were_killed(
    tmp_path: Path, backend: str
) -> None:
    flags = ("--cpu-backend", backend, "--dtype", DTYPES[backend], "--max-model-len", "512")
    args = (default_model(), *flags, "--kv-disk", str(tmp_path))
    with Server(*args) as server:
        answers = [ask(server, prompt) for prompt in PROMPTS]
        assert [num_cached for _, num_cached in answers] == [0, 0, 0]
        wait_until_stored(server, 24 if backend == "native" else 48)
        kill_all(server)
    for _ in range(2):
        with Server(*args) as server:
            # From the first request on, blocks on disk are found.
            again = [ask(server, prompt) for prompt in PROMPTS]
            assert [text for text, _ in again] == [text for text, _ in answers]
            assert all(num_cached for _, num_cached in again)
            total = sum(num_cached for _, num_cached in again)
            assert server.metric("engine:kv_disk_hits_total") == total > 300
            assert_nothing_is_held(server)
            kill_all(server)


def store_blocks(directory: Path) -> tuple[tuple[str, ...], list[str]]:
    """Store the prompts' blocks. Return the arguments of the server, which was killed, and its answers."""
    args = (default_model(), "--max-model-len", "512", "--kv-disk", str(directory))
    with Server(*args) as server:
        answers = [ask(server, prompt)[0] for prompt in PROMPTS]
        wait_until_stored(server, 24)
        kill_all(server)
    return args, answers


def test_prompts_are_computed_where_their_blocks_on_disk_are_damaged(tmp_path: Path) -> None:
    args, answers = store_blocks(tmp_path)
    damage(tmp_path)
    for num_damaged in (3, 0):
        with Server(*args) as server:
            assert [ask(server, prompt)[0] for prompt in PROMPTS] == answers
            assert server.metric("engine:kv_disk_errors_total") == num_damaged
            # The blocks that were computed again replace the damaged ones.
            wait_until_stored(server, num_damaged)
            assert_nothing_is_held(server)
            kill_all(server)


def test_prompts_are_computed_while_the_disk_hangs(tmp_path: Path) -> None:
    args, answers = store_blocks(tmp_path)
    with Server(*args) as server:
        paths = list(tmp_path.rglob("*.sealed"))
        assert paths
        for path in paths:
            # Opening a named pipe to read it blocks until another process writes to it.
            path.unlink()
            os.mkfifo(path)
        start = time.monotonic()
        assert ask(server, PROMPTS[0]) == (answers[0], 0)
        assert time.monotonic() - start < 40
        assert "has not answered a read for 5 s; prompts are computed" in server.log
        # The others do not even wait for it.
        assert [ask(server, prompt)[0] for prompt in PROMPTS[1:]] == answers[1:]
        assert server.metric("engine:kv_transfer_failed_loads_total") == 1
        assert_nothing_is_held(server)


def damage(directory: Path) -> None:
    """Overwrite the third block of each prompt with NaN."""
    (path,) = directory.rglob("*.open")
    with path.open("r+b") as file:
        header = file.read(HEADER_BYTES)
        records = SegmentFormat(header[20:52], BLOCK_BYTES).read_records(file.fileno())
        assert records
        for record in records[2 :: len(records) // len(PROMPTS)]:
            os.pwrite(file.fileno(), b"\xff" * BLOCK_BYTES, record.offset)


def wait_until_stored(server: Server, num_blocks: int) -> None:
    """Wait until this many blocks of bfloat16 are on disk."""
    name = "engine:kv_disk_written_bytes_total"
    wait_until(lambda: server.metric(name) >= num_blocks * BLOCK_BYTES, what="blocks are on disk")


def test_outputs_of_the_encoder_survive_a_restart(tmp_path: Path) -> None:
    model = Model(tmp_path, "idefics3")
    flags = ("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny")
    stored: list[dict[Path, tuple[int, int]]] = []
    for _ in range(2):
        with Server(str(model.path), *flags, "--encoder-disk", str(tmp_path / "outputs")) as server:
            model.check_all(server, [0, 1, 2])
        files = {path: path.stat() for path in (tmp_path / "outputs").rglob("*.sealed")}
        stored.append({path: (each.st_ino, each.st_mtime_ns) for path, each in files.items()})
    before, after = stored
    assert before.keys() == after.keys() and len(before) > 3
    # Files were read, and none was written again. On a busy machine, a step does not wait for a file that is late.
    assert all(after[path][0] == number for path, (number, _) in before.items())
    assert any(after[path][1] > time for path, (_, time) in before.items())


def test_requests_are_answered_while_the_directory_of_outputs_hangs(tmp_path: Path) -> None:
    model = Model(tmp_path, "idefics3")
    outputs = tmp_path / "outputs"
    flags = ("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny")
    with Server(str(model.path), *flags, "--encoder-disk", str(outputs)) as server:
        model.check_all(server, [0])
    paths = list(outputs.rglob("*.sealed"))
    for path in paths:
        # Opening a named pipe to read it blocks until another process writes to it.
        path.unlink()
        os.mkfifo(path)
    with (
        (outputs / "lock").open("w") as lock,
        Server(str(model.path), *flags, "--encoder-disk", str(outputs)) as server,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        model.check_all(server, [0, 1, 2])
        assert all(path.is_fifo() for path in outputs.rglob("*.sealed"))
        fcntl.flock(lock, fcntl.LOCK_UN)
        wait_until(lambda: len(list(outputs.rglob("*.sealed"))) > len(paths), what="outputs")
        assert_nothing_is_held(server)
