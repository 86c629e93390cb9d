"""Several replicas behind several frontends, with real processes."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import psutil
import pytest
from engine.frontend.api.server import PUBLISH_METRICS_S
from support.checkpoints.shallow_model import shallow_model
from support.processes.faults import environment_with
from support.processes.program import wait_until
from support.requests.mixed_streams import Streams, bodies, differences, undisturbed_answers
from support.servers.server import Server

pytestmark = pytest.mark.rotated

REQUESTS = bodies(10)
COUNTS = ("generation_tokens_total", "request_success_total", "e2e_request_latency_seconds_count")
T = TypeVar("T")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    args = ("--data-parallel-size", "2", "--api-server-count", "2", "--metrics-compat", "vllm")
    with Server(shallow_model(), "--max-model-len", "512", *args) as server:
        yield server
        assert server.stop() == 0, server.log


def states(server: Server) -> list[str]:
    return [replica["state"] for replica in server.get("/replicas")[1]["replicas"]]


def epochs(server: Server) -> list[int]:
    return [replica["epoch"] for replica in server.get("/replicas")[1]["replicas"]]


def generated(server: Server, replica: int) -> float:
    return server.metric("engine:generation_tokens_total", engine=str(replica))


def wait_until_stable(read: Callable[[], T]) -> T:
    """Return the status once it has been stable long enough that all frontends must have it."""
    reported, since = read(), time.monotonic()

    def is_settled() -> bool:
        nonlocal reported, since
        if (current := read()) != reported:
            reported, since = current, time.monotonic()
        return time.monotonic() - since > 2 * PUBLISH_METRICS_S

    wait_until(is_settled, what="all frontends tell the same")
    return reported


def counts(server: Server) -> list[float]:
    return [server.metric(f"engine:{name}") for name in COUNTS]


def complete(server: Server, rank: str | None = None) -> tuple[int, Any]:
    headers = {} if rank is None else {"X-data-parallel-rank": rank}
    body = {"prompt": "Once", "max_tokens": 8, "ignore_eos": True}
    return server.post("/v1/completions", body, headers=headers)


def test_a_header_selects_the_replica(server: Server) -> None:
    for rank in (1, 0, 1):
        before = generated(server, rank)
        assert complete(server, str(rank))[0] == 200
        wait_until(
            lambda rank=rank, before=before: generated(server, rank) == before + 8,
            what="the replica's tokens are counted",
        )


@pytest.mark.parametrize("rank", ["2", "-1", "one", "", "9" * 400])
def test_a_replica_that_does_not_exist_is_rejected_with_the_limit(
    server: Server, rank: str
) -> None:
    status, body = complete(server, rank)
    assert status == 400
    assert "from 0 to 1" in body["error"]["message"]
    assert body["error"]["param"] == "X-data-parallel-rank"
    assert len(body["error"]["message"]) < 400


def test_a_drained_replica_gets_no_requests_until_it_is_undrained(server: Server) -> None:
    assert server.post("/replicas/0/drain", {})[1]["state"] == "draining"
    wait_until(lambda: states(server) == ["drained", "serving"], what="drained")
    assert server.get("/readyz")[0] == 200
    before = wait_until_stable(lambda: generated(server, 0))
    for _ in range(6):
        assert complete(server)[0] == 200
    assert wait_until_stable(lambda: generated(server, 0)) == before
    assert complete(server, "0")[0] == 503
    status, body = server.post("/replicas/1/drain", {})
    assert status == 409 and "only serving replica" in body["error"]["message"]
    assert server.post("/replicas/0/undrain", {})[1]["state"] == "serving"
    wait_until(lambda: complete(server, "0")[0] == 200, what="every frontend has received it")


@pytest.mark.parametrize(
    ("path", "status"), [("2/drain", 400), ("x/drain", 400), ("0/explode", 404)]
)
def test_invalid_commands_are_rejected(server: Server, path: str, status: int) -> None:
    assert server.post(f"/replicas/{path}", {})[0] == status
    assert wait_until_stable(lambda: states(server)) == ["serving"] * 2


def test_a_rolling_restart_under_load_loses_no_request(server: Server) -> None:
    requests = REQUESTS[:4]
    undisturbed = Streams(server, requests).answers()
    assert all(answer.get("done") and "error" not in answer for answer in undisturbed)
    before = epochs(server)
    answers: list[list[dict[str, Any]]] = []
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            answers.append(Streams(server, requests).answers())

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for replica in (0, 1):
            assert server.post(f"/replicas/{replica}/restart", {})[0] == 200
            wait_until(
                lambda replica=replica: epochs(server)[replica] == before[replica] + 1,
                40,
                what="its next life",
            )
            # A frontend that has not received it yet would reject the restart of the other replica.
            wait_until(
                lambda: wait_until_stable(lambda: states(server)) == ["serving"] * 2,
                40,
                what="it serves again",
            )
    finally:
        stop.set()
        thread.join()
    assert answers
    for round_of in answers:
        assert differences(round_of, undisturbed) == []


def test_streams_continue_unchanged_on_another_replica(
    server: Server,
) -> None:
    story = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    requests = [
        {"prompt": f"Tale {seed}", "max_tokens": 80, "seed": seed, "temperature": 0.8, **story}
        for seed in range(4)
    ]
    requests[0] |= {"n": 2}
    requests[1] |= {"logprobs": 2}
    requests[2] |= {"temperature": 0}
    to_first = {"X-data-parallel-rank": "0"}
    wait_until(lambda: complete(server, "0")[0] == 200, what="replica 0 takes requests")
    whole = Streams(server, requests, headers=to_first).answers()
    # The stop strings appear late in the text, if at all.
    requests[3] |= {"stop": [whole[3][0]["text"][-20:]], "include_stop_str_in_output": True}
    undisturbed = Streams(server, requests, headers=to_first).answers()
    assert undisturbed[:3] == whole[:3]
    assert undisturbed[3][0]["finish_reason"] == "stop"
    assert len(undisturbed[0][0]["text"]) and undisturbed[0][0] != undisturbed[0][1]
    elsewhere = wait_until_stable(lambda: generated(server, 1))
    streams = Streams(server, requests, headers=to_first)
    wait_until(lambda: all(stream.num_events > 3 for stream in streams.streams), what="all stream")
    server.child("worker 0").kill()
    assert streams.answers() == undisturbed
    wait_until(lambda: generated(server, 1) > elsewhere, what="tokens of the other replica")
    server.wait_until_whole()


def test_a_rolling_restart_with_a_full_queue_loses_no_request() -> None:
    # Streams take longer than a drain, so running and waiting ones continue on the other replica.
    args = ("--device", "null", "--null-step-ms", "20", "-dp", "2", "-np", "4")
    args += ("--heartbeat-timeout", "60")
    requests = [
        {"prompt": f"Tale {seed}", "seed": seed, "max_tokens": 40, "ignore_eos": True}
        | {"stream": True, "stream_options": {"include_usage": True}}
        for seed in range(24)
    ]
    with Server(shallow_model(), *args, "--shutdown-timeout", "1") as server:
        undisturbed = undisturbed_answers(server, requests)
        for replica in ("0", "1"):
            wait_until(lambda: states(server) == ["serving"] * 2, what="both serve")
            before = epochs(server)[int(replica)]
            with server.suspended_workers():
                streams = Streams(server, requests)
                wait_until(
                    lambda: server.get("/load")[1]["server_load"] == len(requests),
                    what="all run or wait",
                )
            streams.wait_for_events(20)
            assert server.post(f"/replicas/{replica}/restart", {})[0] == 200
            assert streams.answers() == undisturbed
            wait_until(lambda r=int(replica), b=before: epochs(server)[r] > b, what="it restarts")
        assert server.stop() == 0, server.log


def test_a_frontend_restarted_while_a_replica_is_down_uses_the_other() -> None:
    args = ("--device", "null", "--data-parallel-size", "2", "--heartbeat-timeout", "60")
    with Server(shallow_model(), *args) as server:
        server.child("worker 1").suspend()
        for title in ("core 1", "frontend 0"):
            victim = server.child(title)
            victim.kill()
            victim.wait(60)
        # The kernel keeps connections for the next frontend, so no client is refused.
        wait_until(lambda: server.get("/readyz")[0] == 200, what="ready again")
        assert complete(server)[0] == 200
        assert complete(server, "1")[0] == 503
        status, body = server.post("/reset_prefix_cache", {})
        assert status == 503 and "replica 1 is not up" in body["error"]["message"]
        server.child("worker 1").resume()
        wait_until(lambda: complete(server, "1")[0] == 200, what="the other one serves as well")
        assert server.post("/reset_prefix_cache", {})[0] == 200
        assert server.stop() == 0


def test_repeated_crashes_of_a_replica_do_not_affect_the_other() -> None:
    args = ("--device", "null", "--data-parallel-size", "2", "--max-restarts", "1")
    with Server(shallow_model(), *args) as server:
        other = server.child("worker 0")
        for _ in range(2):
            server.wait_until_whole()
            server.child("worker 1").kill()
            wait_until(
                lambda: server.metric("engine:replica_up", engine="1") == 0, what="it is down"
            )
        server.wait_for("others serve, and it is restarted every 8 s")
        assert server.metric("engine:replica_up", engine="0") == 1
        assert [replica["is_up"] for replica in server.get("/replicas")[1]["replicas"]] == [
            True,
            False,
        ]
        status, health = server.get("/readyz")
        assert status == 200 and re.search("(core|worker) 1: stopped", health["detail"])
        assert health["detail"] == server.get("/engine/status")[1]["trouble"]
        assert complete(server)[0] == 200
        status, body = server.post("/replicas/0/restart", {})
        assert status == 409 and "only serving replica" in body["error"]["message"]
        server.wait_until_whole()
        wait_until(lambda: complete(server, "1")[0] == 200, what="it serves again")
        assert server.metric("engine:replica_up") == 2
        assert server.get("/readyz")[1]["detail"] == ""
        assert other.is_running() and other.pid == server.child("worker 0").pid
        assert server.stop() == 0


def test_streams_do_not_wait_for_a_replica_in_restart_backoff() -> None:
    args = ("--device", "null", "--null-step-ms", "5", "--data-parallel-size", "2")
    env = environment_with("successor_crash")
    story = {"max_tokens": 400, "ignore_eos": True, "stream": True}
    requests = [{"prompt": f"Part {number}.", "seed": number, **story} for number in range(8)]
    with Server(shallow_model(), *args, env=env) as server:
        undisturbed = undisturbed_answers(server, requests)
        streams = Streams(server, requests)
        streams.wait_for_events(50)
        assert server.metric("engine:num_requests_running", engine="0") > 0
        server.child("core 0").kill()
        assert streams.answers() == undisturbed

        def has_failed_again() -> bool:
            # On a slow machine, the streams end before the successor receives any of them.
            complete(server, "0")
            return server.log.count("core 0 was killed by SIGKILL") == 2

        wait_until(has_failed_again, what="the successor fails")
        wait_until(
            lambda: server.metric("engine:replica_up", engine="0") == 0, what="the replica is down"
        )
        assert server.stop() == 0


def test_restart_commands_before_the_start_are_rejected() -> None:
    # A worker without a model would be ready before it is suspended.
    args = ("--data-parallel-size", "2", "--heartbeat-timeout", "60")
    with Server(shallow_model(), *args, wait=False) as server:
        worker = server.child("worker 1")
        worker.suspend()
        listening = psutil.CONN_LISTEN
        frontend = server.child("frontend 0")
        ports: list[int] = []

        def find_port() -> bool:
            found = frontend.net_connections("tcp")
            ports[:] = [each.laddr.port for each in found if each.status == listening]
            return bool(ports)

        wait_until(find_port, what="the frontend listens")
        url = f"http://127.0.0.1:{ports[0]}/replicas/0/restart"
        request = urllib.request.Request(url, b"{}", {"content-type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as refusal:
            urllib.request.urlopen(request, timeout=30)
        with refusal.value as answer:
            assert answer.code == 503 and "is starting" in json.load(answer)["error"]["message"]
            assert int(answer.headers["retry-after"]) > 0
        worker.resume()
        server.wait_for("ready at")
        assert epochs(server) == [1, 1]
        assert server.stop() == 0


def test_counters_of_an_exited_frontend_are_kept(server: Server) -> None:
    Streams(server, REQUESTS).answers()
    for index in (0, 1):
        before = wait_until_stable(lambda: counts(server))
        victim = server.child(f"frontend {index}")
        victim.kill()
        victim.wait(60)
        # The token by which the new frontend checks the engine is not counted.
        server.wait_until_whole()
        assert wait_until_stable(lambda: counts(server)) == before


def test_old_names_of_metrics_are_exported(server: Server) -> None:
    assert complete(server)[0] == 200
    assert server.metric("vllm:gpu_cache_usage_perc") == server.metric("vllm:kv_cache_usage_perc")
    name = "vllm:time_per_output_token_seconds_count"
    wait_until(lambda: server.metric(name) > 0, what="the times of tokens are counted")
