"""A replica on two machines: tokens, keys, and recovery when a machine is lost."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from engine.protocol.cluster_key import ClusterKey
from support.checkpoints.tiny import mixture_directory
from support.processes.machines import Machine, client, free_ports, program, two_machines
from support.processes.program import Program, has_ended, wait_until

pytestmark = pytest.mark.rotated

FLAGS = ("--dtype", "float32", "--served-model-name", "tiny")
REQUEST = {
    "model": "tiny",
    "prompt": [5, 6, 7, 8, 9],
    "max_tokens": 450,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


class Cluster:
    """Command lines of an engine on two machines that share a key and a model."""

    def __init__(self, directory: Path, machines: tuple[Machine, Machine]) -> None:
        self.machines = machines
        self.model, _ = mixture_directory(directory)
        self.key = directory / "key"
        ClusterKey.generate().save(str(self.key))
        self.uds = directory / "api"
        address = machines[0].address
        port = free_ports("127.0.0.1" if address.startswith("127.") else "0.0.0.0", 8)
        self.torch_port = port + 6
        self.core = f"{address}:{port}"
        self._master = ["--master-addr", address, "--master-port", str(port)]
        self._worker = ["worker", "--core", self.core, "--key", str(self.key)]

    def serve(self, *flags: str) -> Program:
        uds = ["--uds", str(self.uds)]
        key = ["--cluster-key", str(self.key)]
        args = [str(self.model), *FLAGS, *uds, *self._master, *key]
        return program(self.machines[0], "serve", *args, *flags)

    def headless(self, *flags: str, key: Path | None = None) -> Program:
        place = ["--headless", "-n", "2", "-r", "1", *self._master]
        return program(
            self.machines[1], "serve", *place, "--cluster-key", str(key or self.key), *flags
        )

    def torchrun(self, node: int, engine: Path) -> Program:
        place = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"]
        address = self.machines[0].address
        place += ["--master-addr", address, "--master-port", str(self.torch_port)]
        place += ["--local-addr", self.machines[node].address]
        launcher = [sys.executable, "-P", "-m", "torch.distributed.run", *place]
        return program(
            self.machines[node], "--no-python", str(engine), *self._worker, launcher=launcher
        )

    def tokens(self, **options: object) -> list[int]:
        with client(self.uds) as http:
            answer = http.post("/v1/completions", json=REQUEST | options)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])

    def processes(self) -> dict[str, int]:
        with client(self.uds) as http:
            rows = http.get("/engine/status").json()["processes"]
        return {row["name"]: row["pid"] for row in rows}

    def readiness(self) -> httpx.Response:
        with client(self.uds) as http:
            return http.get("/readyz")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with two_machines() as machines:
        # Socket paths must be short.
        directory = tmp_path_factory.mktemp("c")
        yield Cluster(directory, machines)


@pytest.fixture(scope="module")
def tokens_of_one_machine(cluster: Cluster) -> list[int]:
    with program(
        cluster.machines[0], "serve", str(cluster.model), *FLAGS, "--uds", str(cluster.uds)
    ) as server:
        server.wait_for("ready at")
        tokens = cluster.tokens()
        assert server.stop() == 0
    return tokens


@pytest.mark.parametrize("flags", [("-tp", "2"), ("-dp", "2", "-ep")], ids=" ".join)
def test_a_stream_survives_a_crash_of_a_remote_worker_and_its_machine(
    cluster: Cluster, tokens_of_one_machine: list[int], flags: tuple[str, ...]
) -> None:
    """This also holds if the replicas of both machines divide the experts."""
    with (
        cluster.serve(*flags, "-n", "2") as server,
        concurrent.futures.ThreadPoolExecutor(4) as pool,
    ):
        node = cluster.headless()
        with node:
            server.wait_for("ready at")
            assert cluster.tokens() == tokens_of_one_machine
            first = cluster.processes()["worker 1"]
            stream = pool.submit(cluster.tokens)
            os.kill(first, signal.SIGKILL)
            assert stream.result() == tokens_of_one_machine
            assert cluster.processes()["worker 1"] not in (0, first)
            stream = pool.submit(cluster.tokens)
            node.stop(signal.SIGKILL)
        wait_until(lambda: "waiting for node 1" in cluster.readiness().text, 30, "the loss")
        assert cluster.readiness().status_code == 503
        assert not stream.done()
        with cluster.headless("--model", str(cluster.model)) as node:
            assert stream.result() == tokens_of_one_machine
            wait_until(lambda: cluster.readiness().status_code == 200)
            assert server.stop() == 0, server.log
            assert node.wait() == 0, node.log


def test_a_stop_signal_to_all_machines_lets_streams_finish(
    cluster: Cluster, tokens_of_one_machine: list[int]
) -> None:
    with cluster.serve("-tp", "2", "-n", "2") as server, cluster.headless() as node:
        server.wait_for("ready at")
        node.signal_all(signal.SIGTERM)
        node.wait_for("workers keep running while node 0 drains")
        with (
            client(cluster.uds) as http,
            http.stream("POST", "/v1/completions", json=REQUEST | {"stream": True}) as answer,
        ):
            tokens = []
            for line in filter(None, answer.iter_lines()):
                if not tokens:
                    server.signal_all(signal.SIGTERM)
                if line != "data: [DONE]":
                    [choice] = json.loads(line.removeprefix("data: "))["choices"]
                    tokens += choice["token_ids"]
        assert tokens == tokens_of_one_machine
        assert server.wait() == 0, server.log
        assert node.wait() == 0, node.log


def test_a_stream_survives_a_machine_that_hangs(
    cluster: Cluster, tokens_of_one_machine: list[int]
) -> None:
    with (
        cluster.serve("-pp", "2", "-n", "2", "--heartbeat-timeout", "2") as server,
        cluster.headless() as node,
    ):
        server.wait_for("ready at")
        first = cluster.processes()["worker 1"]
        node.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: cluster.processes()["worker 1"] != first, 30, "the loss")
        node.process.send_signal(signal.SIGCONT)
        assert cluster.tokens() == tokens_of_one_machine
        assert cluster.processes()["worker 1"] not in (0, first)
        assert server.stop() == 0, server.log
        assert node.wait() == 0, node.log


def test_workers_of_a_launcher_restart_after_a_crash(
    cluster: Cluster, tokens_of_one_machine: list[int], tmp_path: Path
) -> None:
    engine = tmp_path / "engine"
    engine.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m engine.frontend.cli.main "$@"\n')
    engine.chmod(0o700)
    with (
        cluster.serve("-tp", "2", "--distributed-executor-backend", "external_launcher") as server,
        cluster.torchrun(0, engine) as first,
        cluster.torchrun(1, engine) as second,
    ):
        server.wait_for("ready at")
        assert cluster.tokens() == tokens_of_one_machine
        os.kill(cluster.processes()["worker 0"], signal.SIGKILL)
        assert cluster.tokens() == tokens_of_one_machine
        assert server.stop() == 0, server.log
        assert (first.wait(), second.wait()) == (0, 0), first.log + second.log


def test_machines_that_do_not_fit_are_rejected_or_ignored(cluster: Cluster, tmp_path: Path) -> None:
    other_key, broken = tmp_path / "other", tmp_path / "model"
    ClusterKey.generate().save(str(other_key))
    shutil.copytree(cluster.model, broken)
    for weights in broken.glob("*.safetensors"):
        weights.write_bytes(b"")
    with cluster.serve("-tp", "2", "-n", "2") as server, cluster.headless(key=other_key) as thief:
        thief.wait_for("connects to")
        with cluster.headless("-n", "4") as stray:
            assert stray.wait() == 1
            assert "--nnodes is 4 there, but 2 on node 0" in stray.log.splitlines()[-1]
        with cluster.headless("--model", str(broken)) as node:
            assert node.wait() == 1
            assert "differs from" in node.log.splitlines()[-1]
        server.wait_for("a node did not join")
        with cluster.headless() as node:
            server.wait_for("ready at")
            assert "joined" not in thief.log
            assert thief.stop() == 0
            # A second signal stops the node immediately.
            node.process.send_signal(signal.SIGTERM)
            node.wait_for("a second signal")
            assert node.stop() == 0
            wait_until(lambda: "waiting for node 1" in cluster.readiness().text, 30, "the loss")
            assert server.stop(signal.SIGKILL) == -signal.SIGKILL


def test_a_failed_start_is_reported_on_every_machine(cluster: Cluster) -> None:
    with (
        cluster.serve("-tp", "2", "-n", "2", "--kv-cache-memory-bytes", "1") as server,
        cluster.headless() as node,
    ):
        assert server.wait() == 1
        assert "KV" in server.log.splitlines()[-1]
        assert node.wait() == 1
        assert "KV" in node.log.splitlines()[-1]


def test_workers_exit_with_their_machine_and_with_the_engine(cluster: Cluster) -> None:
    flags = ("--device", "null", "-dp", "2", "-n", "2", "--heartbeat-timeout", "3")
    with cluster.serve(*flags) as server:
        with cluster.headless() as node:
            server.wait_for("ready at")
            remote = psutil.Process(cluster.processes()["worker 1"])
            assert node.stop(signal.SIGKILL) == -signal.SIGKILL
            wait_until(lambda: has_ended(remote), what="the worker has followed its machine")
        with cluster.headless() as node:
            wait_until(lambda: cluster.processes()["worker 1"] not in (0, remote.pid), what="anew")
            remote = psutil.Process(cluster.processes()["worker 1"])
            local = psutil.Process(server.process.pid).children(recursive=True)
            assert server.stop(signal.SIGKILL) == -signal.SIGKILL
            assert len(local) >= 4
            wait_until(lambda: all(map(has_ended, local)), what="node 0 has nothing left")
            wait_until(lambda: has_ended(remote), what="nor has the other machine")
            assert node.process.poll() is None
            assert node.stop() == 0, node.log
