"""Replicas whose workers divide the experts give the tokens of one worker, and survive crashes together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from support.checkpoints.tiny import mixture_directory
from support.processes.faults import ENVIRONMENT, fail
from support.processes.program import wait_until
from support.requests.mixed_streams import Streams, bodies, undisturbed_answers
from support.servers.server import Server, assert_nothing_is_held

pytestmark = pytest.mark.rotated

REQUESTS = [{**body, "max_tokens": 60} for body in bodies(10)]
RAISED = "worker 1: RuntimeError: a test asked for this failure"
COMMON = ("--dtype", "float32", "--threads", "1", "--kv-cache-memory-bytes", "16000000")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = mixture_directory(tmp_path_factory.mktemp("mixture"))[0]
    return path


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[dict[str, Any]]:
    with Server(str(checkpoint), *COMMON) as server:
        return undisturbed_answers(server, REQUESTS)


@pytest.fixture(scope="module", params=[(), ("-tp", "2")], ids=["-dp 2", "-dp 2 -tp 2"])
def flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    args: tuple[str, ...] = request.param
    return args


@pytest.fixture(scope="module")
def server(checkpoint: Path, flags: tuple[str, ...]) -> Iterator[Server]:
    args = (*COMMON, "-dp", "2", "-ep", *flags)
    with Server(str(checkpoint), *args, env=ENVIRONMENT) as server:
        yield server
        assert server.stop() == 0, server.log


def comparable(answers: list[dict[str, Any]], flags: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the parts of the answers that must be equal.

    These are all parts if a token's sums have the same order as in one worker. If ranks sum, or torch multiplies, the
    last digits of log-probabilities differ.
    """
    if not flags:
        return answers
    return [{key: without_logprobs(value) for key, value in answer.items()} for answer in answers]


def without_logprobs(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: part for name, part in value.items() if "logprobs" not in name}


def workers(server: Server) -> list[psutil.Process]:
    names = [p["name"] for p in server.get("/engine/status")[1]["processes"]]
    return [server.child(name) for name in names if name.startswith("worker")]


def test_both_replicas_give_the_tokens_of_one_worker_and_read_their_experts(
    server: Server, checkpoint: Path, expected: list[dict[str, Any]], flags: tuple[str, ...]
) -> None:
    assert comparable(Streams(server, REQUESTS).answers(), flags) == comparable(expected, flags)
    read = [float(size) for size in re.findall(r"read (\S+) MB", server.log)]
    assert len(read) == len(workers(server))
    tensors = load_file(checkpoint / "model.safetensors")
    sizes = {name: tensor.nbytes / 1e6 for name, tensor in tensors.items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert max(read) < sum(sizes.values()) - 0.4 * experts


def test_a_replica_computes_while_the_other_is_idle(
    server: Server, expected: list[dict[str, Any]], flags: tuple[str, ...]
) -> None:
    # Each layout tries another one.
    replica = "1" if flags else "0"
    streams = Streams(server, REQUESTS, headers={"X-data-parallel-rank": replica})
    assert comparable(streams.answers(), flags) == comparable(expected, flags)
    assert_nothing_is_held(server)


def test_idle_replicas_use_no_processor(server: Server) -> None:
    def used(process: psutil.Process) -> float:
        return sum(process.cpu_times()[:2])

    processes = workers(server)
    before = [used(process) for process in processes]
    wait_until(lambda: server.get("/livez")[0] == 200, what="the server answers")
    psutil.cpu_percent(interval=1.0)
    assert [used(p) - b for p, b in zip(processes, before, strict=True)] == pytest.approx(
        [0.0] * len(processes), abs=0.2
    )


def test_all_replicas_restart_with_a_worker_and_streams_continue(
    server: Server, expected: list[dict[str, Any]], flags: tuple[str, ...]
) -> None:
    if flags:
        # Its peers abort when they lose it, before it has reported its error.
        title, harm, cause = "worker 1", fail, RAISED
    else:
        title, harm, cause = "worker 0", psutil.Process.kill, "worker 0 was killed by SIGKILL"
    server.wait_until_whole()
    num_lines = len(server.output)
    streams = Streams(server, REQUESTS)
    streams.wait_for_events(50)
    before = [*workers(server), server.child("core 0"), server.child("core 1")]
    harm(server.child(title))
    wait_until(lambda: not any(p.is_running() for p in before), what="all have restarted")
    assert comparable(streams.answers(), flags) == comparable(expected, flags)
    restarts = [line for line in server.output[num_lines:] if "restarting it" in line]
    assert [cause in line for line in restarts] == [True], server.output[num_lines:]
    server.wait_until_whole()
    assert server.get("/readyz")[0] == 200
    assert_nothing_is_held(server)


def test_all_replicas_sleep_together_and_streams_continue(
    server: Server, expected: list[dict[str, Any]], flags: tuple[str, ...]
) -> None:
    server.wait_until_whole()
    streams = Streams(server, REQUESTS)
    streams.wait_for_events(50)
    assert server.post("/replicas/1/sleep", b"")[0] == 409
    assert server.post("/sleep?mode=keep", b"")[0] == 200
    assert not workers(server)
    assert server.post("/wake_up", b"")[0] == 200
    assert comparable(streams.answers(), flags) == comparable(expected, flags)
    assert_nothing_is_held(server)


def test_workers_survive_a_core_crash(
    server: Server, expected: list[dict[str, Any]], flags: tuple[str, ...]
) -> None:
    server.wait_until_whole()
    # A core that crashes before reporting a token also restarts its workers.
    Streams(server, REQUESTS[:2] * 2).answers()
    survivors = workers(server)
    streams = Streams(server, REQUESTS)
    streams.wait_for_events(50)
    server.child("core 1").kill()
    assert comparable(streams.answers(), flags) == comparable(expected, flags)
    assert all(worker.is_running() for worker in survivors)


def test_only_the_poison_request_fails(checkpoint: Path) -> None:
    """Both replicas restart, but requests of the other replica are not suspected."""
    poison = 301
    # The workers would also crash on these tokens in a stream.
    requests = [{**body, "logit_bias": {str(poison): -100}} for body in REQUESTS[:6]]
    args = (*COMMON, "-dp", "2", "-ep", "--inject-crash", str(poison))
    with Server(str(checkpoint), *args) as server:
        undisturbed = undisturbed_answers(server, requests)
        bad = {"prompt": [5, poison, 6], "max_tokens": 8, "stream": False}
        *answers, failed = Streams(server, [*requests, bad]).answers()
        assert failed["status"] == 500
        assert answers == undisturbed
        assert server.log.count("was killed by SIGSEGV") == 2, server.log
        assert server.stop() == 0, server.log


def test_replicas_in_torch_give_the_tokens_of_one_worker(
    checkpoint: Path, expected: list[dict[str, Any]]
) -> None:
    flags = ("-dp", "2", "-ep", "--cpu-backend", "torch")
    with Server(str(checkpoint), *COMMON, *flags) as server:
        answers = Streams(server, REQUESTS).answers()
        assert comparable(answers, flags) == comparable(expected, flags)
        assert server.stop() == 0, server.log


def test_a_replica_cannot_restart_alone(server: Server) -> None:
    status, answer = server.post("/replicas/0/restart", {})
    assert status == 409
    assert "--enable-expert-parallel" in answer["error"]["message"]
