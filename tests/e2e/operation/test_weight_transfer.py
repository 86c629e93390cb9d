"""A trainer sends weights through torch.distributed while the server keeps its address and its clients."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from support.checkpoints.tiny import qwen3_directory
from support.servers.server import Server, assert_nothing_is_held

pytestmark = pytest.mark.rotated

TRAINER = Path(__file__).parents[2] / "support/servers/trainer.py"
TRANSFER = ("--weight-transfer-config", '{"backend": "gloo", "timeout_s": 4}')
FLAGS = ("--dtype", "float32", "-tp", "2", "--api-server-count", "2")
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3_directory(tmp_path_factory.mktemp("first"))[0]


@pytest.fixture(scope="module")
def second(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other embeddings, which are also its output projection."""
    target = tmp_path_factory.mktemp("second")
    tensors = {}
    for file in first.iterdir():
        if file.suffix == ".safetensors":
            tensors |= load_file(file)
        elif not file.name.endswith(".index.json"):
            (target / file.name).write_bytes(file.read_bytes())
    tensors[EMBEDDING] = tensors[EMBEDDING][::-1].copy()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.fixture(scope="module")
def server(first: Path) -> Iterator[Server]:
    with Server(str(first), *FLAGS, *TRANSFER) as server:
        server.wait_until_whole()
        yield server
        assert_nothing_is_held(server)


def train(server: Server, path: Path, dialect: str, packed: bool, **settings: Any) -> str:
    """Send the tensors of a checkpoint. Return the error of the server; "" if there is none."""
    text = json.dumps({"dialect": dialect, "packed": packed, **settings})
    command = [sys.executable, str(TRAINER), server.url, str(path), text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return "" if done.returncode == 0 else done.stderr.strip() or "ended"


def tokens(server: Server) -> list[int]:
    params = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": list(range(5, 45)), "sampling_params": params}
    status, answer = server.post("/generate", body)
    assert status == 200, answer
    return answer["output_ids"]


def test_server_generates_as_one_started_with_the_weights_of_the_trainer(
    server: Server, first: Path, second: Path
) -> None:
    before = tokens(server)
    with Server(str(second), "--dtype", "float32") as other:
        after = tokens(other)
    assert before != after
    assert not train(server, second, "vllm", True, chunk_bytes=100_000, version="step-7")
    assert tokens(server) == after
    assert server.get("/weight_info")[1] == {"weight_version": "step-7"}
    rows = server.post("/get_weights_by_name", {"name": EMBEDDING, "truncate_size": 2})[1]
    assert rows == load_file(second / "model.safetensors")[EMBEDDING][:2].tolist()
    # A part of the weights: the others stay.
    assert not train(server, first, "sglang", False, names=[EMBEDDING])
    assert tokens(server) == before
    assert not train(server, second, "sglang", True)
    assert tokens(server) == after
    for title in ("worker 0", "supervisor"):
        server.child(title).kill()
        server.wait_until_whole()
        assert tokens(server) == after
    assert not train(server, first, "vllm", False, rounds=2)
    assert tokens(server) == before


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"ends_before": 2}, ""),
        ({"stalls_before": 2}, "the trainer did not send what it announced"),
        ({"announced": {"names": ["a.b"], "dtype_names": ["float32"], "shapes": [[1]]}}, "'a.b'"),
    ],
)
def test_trainer_that_fails_leaves_the_old_weights(
    server: Server, second: Path, settings: dict[str, Any], problem: str
) -> None:
    before = tokens(server)
    error = train(server, second, "vllm", False, **settings)
    assert problem in error, error
    status, answer = server.post("/finish_weight_update", b"")
    assert status in (400, 409), answer
    assert tokens(server) == before
