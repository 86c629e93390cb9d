"""Images, adapters, embeddings, scores, beams and text share a server that crashes or sleeps: no answer changes."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.processes.program import wait_until
from support.requests.all_kinds import answers, model_requests, write_model
from support.servers.server import Server, assert_nothing_is_held

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("all")


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Server]:
    with Server(*write_model(directory)) as server:
        yield server
        assert server.stop() == 0, server.log


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[Any]:
    found = answers(server, model_requests())
    assert [answer for answer in found if "error" in answer] == []
    return found


@pytest.mark.parametrize("titles", [("worker 0",), ("core 0",), ("core 0", "worker 0")])
def test_answers_are_unchanged_by_crashes(
    server: Server, undisturbed: list[Any], titles: tuple[str, ...]
) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(answers, server, model_requests())
        for title in titles:
            wait_until(lambda: server.metric("engine:num_requests_running") > 1, what="they run")
            victim = server.child(title)
            victim.kill()
            psutil.wait_procs([victim], timeout=10)
        assert found.result() == undisturbed
    assert_nothing_is_held(server)


def test_answers_are_unchanged_by_a_sleep(server: Server, undisturbed: list[Any]) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(answers, server, model_requests())
        for _ in range(2):
            wait_until(lambda: server.metric("engine:num_requests_running") > 1, what="they run")
            assert server.post("/sleep?mode=keep", b"")[0] == 200
            assert server.post("/wake_up", b"")[0] == 200
        assert found.result() == undisturbed
    assert_nothing_is_held(server)


def test_a_worker_restarts_without_the_files_of_an_adapter(
    server: Server, undisturbed: list[Any], directory: Path
) -> None:
    removed = (directory / "three").rename(directory / "removed")
    victim = server.child("worker 0")
    victim.kill()
    psutil.wait_procs([victim], timeout=10)
    found = answers(server, model_requests())
    removed.rename(directory / "three")
    lost = [index for index, answer in enumerate(found) if "error" in answer]
    bodies = [request[1] for request in model_requests() if not callable(request)]
    assert lost == [at for at, body in enumerate(bodies) if "three" in str(body)]
    assert all("has no adapter_config.json" in str(found[index]) for index in lost)
    assert [a for a in found if "error" not in a] == [
        answer for index, answer in enumerate(undisturbed) if index not in lost
    ]
    assert answers(server, model_requests()) == undisturbed
    assert_nothing_is_held(server)
