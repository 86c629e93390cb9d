"""Loading other weights into a running server, as trainers do between two rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine import LLM, SamplingParams
from safetensors.numpy import load_file, save_file
from support.checkpoints.tiny import qwen3_directory
from support.processes.program import wait_until
from support.servers.server import Server, assert_nothing_is_held

pytestmark = pytest.mark.rotated

UPDATE = "/update_weights_from_disk"
FLAGS = ("--dtype", "float32", "-dp", "2", "--api-server-count", "2", "--kv-disk-gib", "1")


def changed(source: Path, target: Path, without: str = "", **config: int) -> Path:
    """Write a copy of a checkpoint with other embeddings, without one tensor, or with other fields in its config."""
    target.mkdir()
    tensors = {}
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            tensors |= load_file(file)
        elif not file.name.endswith(".index.json"):
            (target / file.name).write_bytes(file.read_bytes())
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    tensors.pop(without, None)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    text = (source / "config.json").read_text()
    for name, value in config.items():
        text = text.replace(f'"{name}"', f'"{name}": {value}, "old_{name}"')
    (target / "config.json").write_text(text)
    return target


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, _ = qwen3_directory(tmp_path_factory.mktemp("source"))
    path = tmp_path_factory.mktemp("models") / "first"
    return changed(source, path, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def second(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed(first, tmp_path_factory.mktemp("models") / "second")


@pytest.fixture(scope="module")
def server(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    disk = ("--kv-disk", str(tmp_path_factory.mktemp("disk")))
    with Server(str(first), *FLAGS, *disk) as server:
        server.wait_until_whole()
        yield server
        assert_nothing_is_held(server)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


NUM_TOKENS = 6000


def generate(server: Server, num_tokens: int = 24) -> dict[str, Any]:
    params = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    status, answer = server.post(
        "/generate", {"input_ids": list(range(5, 45)), "sampling_params": params}
    )
    assert status == 200, answer
    return answer


def tokens(server: Server) -> list[int]:
    return generate(server)["output_ids"]


def update(server: Server, path: Path, **fields: Any) -> None:
    answers: list[tuple[int, Any]] = []

    def is_accepted() -> bool:
        answers.append(server.post(UPDATE, {"model_path": str(path), **fields}))
        return answers[-1][0] != 503

    # A frontend may get the status of a replica later than the one that reported it as ready.
    wait_until(is_accepted, what="all replicas are up")
    status, answer = answers[-1]
    assert (status, answer.get("success")) == (200, True), answer


def wait_until_running(server: Server, number: int) -> None:
    wait_until(lambda: server.metric("engine:num_requests_running") == number, what="all run")


def test_all_replicas_get_the_weights_and_keep_them(
    server: Server, first: Path, second: Path
) -> None:
    before = tokens(server)
    with Server(str(second), "--dtype", "float32") as other:
        after = tokens(other)
    assert before != after
    fingerprint = server.post("/v1/completions", {"prompt": [5], "max_tokens": 1})[1]
    update(server, second, weight_version="step-7")
    for _ in range(4):
        answer = generate(server)
        assert answer["output_ids"] == after
        assert answer["meta_info"]["weight_version"] == "step-7"
    info = server.get("/model_info")[1]
    assert (info["model_path"], info["weight_version"]) == (str(second), "step-7")
    assert server.get("/weight_info")[1] == {"weight_version": "step-7"}
    other = server.post("/v1/completions", {"prompt": [5], "max_tokens": 1})[1]
    assert other["system_fingerprint"] != fingerprint["system_fingerprint"]
    assert server.post("/update_weight_version", {"new_version": "step-8"})[0] == 200
    assert generate(server)["meta_info"]["weight_version"] == "step-8"
    for title in ("worker 0", "core 1", "supervisor", "frontend 0"):
        server.child(title).kill()
        server.wait_until_whole()
        assert [tokens(server) for _ in range(4)] == [after] * 4
    status, answer = server.post(
        "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(first)}}
    )
    assert (status, answer) == (200, {"results": [None, None]})
    assert [tokens(server) for _ in range(4)] == [before] * 4


def test_weights_that_cannot_be_loaded_leave_the_old_ones(
    server: Server, first: Path, tmp_path: Path
) -> None:
    before = tokens(server)
    name = "model.layers.1.self_attn.q_proj.weight"
    broken = changed(first, tmp_path / "broken", without=name)
    status, answer = server.post(UPDATE, {"model_path": str(broken)})
    assert (status, answer.get("success")) == (400, False), answer
    assert name in answer["message"]
    server.wait_until_whole()
    assert [tokens(server) for _ in range(4)] == [before] * 4
    larger = changed(first, tmp_path / "larger", num_hidden_layers=7)
    for path, words in ((larger, "num_hidden_layers is 7"), (tmp_path / "none", "does not exist")):
        status, answer = server.post(UPDATE, {"model_path": str(path)})
        assert status == 400 and words in answer["error"]["message"]
        assert answer["error"]["param"] == "model_path"
    status, answer = server.post("/collective_rpc", {"method": "launch"})
    assert (status, answer["error"]["param"]) == (400, "method")
    status, answer = server.post("/start_weight_update", b"")
    assert status == 403 and "--weight-transfer-config" in answer["error"]["message"]


def start(server: Server, pool: ThreadPoolExecutor) -> list[Future[dict[str, Any]]]:
    server.wait_until_whole()
    running = [pool.submit(generate, server, NUM_TOKENS) for _ in range(4)]
    wait_until_running(server, 4)
    return running


def test_running_requests_end_abort_or_continue(
    server: Server, first: Path, second: Path, pool: ThreadPoolExecutor
) -> None:
    expected = generate(server, NUM_TOKENS)["output_ids"]
    running = start(server, pool)
    update(server, first)
    assert [each.result()["output_ids"] for each in running] == [expected] * 4
    running = start(server, pool)
    update(server, first, abort_all_requests=True)
    reasons = [each.result()["meta_info"]["finish_reason"]["type"] for each in running]
    assert reasons == ["abort"] * 4
    running = start(server, pool)
    assert server.post("/pause_generation", {"mode": "retract"})[0] == 200
    update(server, second)
    assert not any(each.done() for each in running)
    assert server.post("/continue_generation", {})[0] == 200
    found = [each.result()["output_ids"] for each in running]
    assert all(len(each) == NUM_TOKENS and each != expected for each in found)
    update(server, first)


def test_a_sleeping_server_wakes_with_the_weights(
    server: Server, first: Path, second: Path
) -> None:
    before = tokens(server)
    assert server.post("/sleep?level=2", b"")[0] == 200
    update(server, second)
    assert server.get("/is_sleeping") == (200, {"is_sleeping": True})
    assert server.post("/wake_up", b"")[0] == 200
    assert tokens(server) != before
    update(server, first)
    assert tokens(server) == before


def test_llm_loads_weights(first: Path, second: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)

    def generated(llm: LLM) -> list[int]:
        return llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)[0].outputs[0].token_ids

    with LLM(str(second), dtype="float32") as llm:
        expected = generated(llm)
    with LLM(str(first), dtype="float32") as llm:
        assert generated(llm) != expected
        llm.load_weights(str(second))
        assert generated(llm) == expected


def is_updating(server: Server) -> bool:
    return any(each["state"] == "waking" for each in server.get("/replicas")[1]["replicas"])


@pytest.mark.parametrize("title", ["supervisor", "worker 1", "core 0"])
def test_an_update_outlives_a_killed_process(
    server: Server, first: Path, second: Path, pool: ThreadPoolExecutor, title: str
) -> None:
    before, earlier = tokens(server), server.child(title)
    updated = pool.submit(update, server, second)
    wait_until(lambda: is_updating(server), what="the update begins")
    if title != "supervisor":
        # The update ends the earlier process, which may exit before it can be killed.
        wait_until(lambda: server.child(title) != earlier, what="its successor has started")
    server.child(title).kill()
    updated.result()
    server.wait_until_whole()
    assert tokens(server) != before
    update(server, first)
    assert tokens(server) == before


def test_generation_is_resumed_after_the_frontend_of_an_update_was_killed(
    server: Server, first: Path, second: Path
) -> None:
    before = tokens(server)
    with server.sending(UPDATE, {"model_path": str(second)}) as client:
        wait_until(lambda: is_updating(server), what="the update begins")
        server.frontend_of(client).kill()
        assert client.recv(1) == b""
    server.wait_until_whole()
    assert all(each != before for each in (tokens(server) for _ in range(4)))
    update(server, first)
    assert tokens(server) == before
