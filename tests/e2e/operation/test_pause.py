"""Pausing generation, and unloading the model, on several replicas with several frontends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from support.processes.program import wait_until
from support.servers.server import Server, assert_nothing_is_held, default_model, title_of

NUM_TOKENS = 800
NUM_REQUESTS = 6
LONGER_S = 2.0
"""Seconds, longer than the requests take."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--device", "null", "--null-step-ms", "2", "-dp", "2", "--api-server-count", "2")
    flags += ("--sleep-idle", "100000")
    with Server("--model", default_model(), *flags) as server:
        server.wait_until_whole()
        yield server
        server.post("/resume", b"")
        assert_nothing_is_held(server)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(2 * NUM_REQUESTS)
    yield pool
    pool.shutdown(wait=False)


@pytest.fixture(autouse=True)
def resumed(server: Server) -> Iterator[None]:
    """Resume after each test, so that one that fails leaves no paused server to the next."""
    yield
    server.post("/resume", b"")


Answers = list[Future[tuple[int, Any]]]


def start(server: Server, pool: ThreadPoolExecutor, max_tokens: int = NUM_TOKENS) -> Answers:
    """Start several requests with fixed seeds."""
    bodies = [
        {"prompt": [5, 6, 7, seed], "seed": seed, "max_tokens": max_tokens, "ignore_eos": True}
        | {"return_token_ids": True}
        for seed in range(NUM_REQUESTS)
    ]
    return [pool.submit(server.post, "/v1/completions", body) for body in bodies]


def tokens(answers: Answers) -> list[list[int]]:
    found = [each.result() for each in answers]
    assert {status for status, _ in found} == {200}, found
    return [answer["choices"][0]["token_ids"] for _, answer in found]


def start_running(
    server: Server, pool: ThreadPoolExecutor, max_tokens: int = NUM_TOKENS
) -> Answers:
    """Start several requests, and wait until they run."""
    # The metric may still count those of the test that have ended.
    wait_until(lambda: server.metric("engine:num_requests_running") == 0, what="none runs")
    answers = start(server, pool, max_tokens)
    wait_until(lambda: server.metric("engine:num_requests_running") == NUM_REQUESTS, what="all run")
    return answers


def wait_until_waiting(server: Server) -> None:
    wait_until(
        lambda: server.metric("engine:num_requests_waiting") == NUM_REQUESTS, what="metrics count"
    )


def wait_for_state(server: Server, *, is_paused: bool) -> None:
    """Wait until both frontends report the state. Connections go to either of them."""

    def agree() -> bool:
        answers = [server.get("/is_paused")[1] for _ in range(8)]
        return answers == [{"is_paused": is_paused}] * 8

    wait_until(agree, what="both frontends know")


def post(server: Server, path: str, body: Any = b"") -> Any:
    status, answer = server.post(path, body)
    assert status == 200, answer
    return answer


def test_kept_requests_continue_after_the_pause(server: Server, pool: ThreadPoolExecutor) -> None:
    expected = tokens(start(server, pool))
    running = start_running(server, pool)
    assert post(server, "/pause?mode=keep") == {"status": "paused"}
    wait_for_state(server, is_paused=True)
    late = start(server, pool)
    wait_until(
        lambda: server.get("/load")[1]["server_load"] == 2 * NUM_REQUESTS, what="more requests wait"
    )
    assert server.get("/health")[0] == 200
    wait_until_waiting(server)
    time.sleep(LONGER_S)
    assert not any(each.done() for each in running + late)
    assert post(server, "/resume") == {"status": "resumed"}
    assert tokens(running) == expected == tokens(late)
    wait_for_state(server, is_paused=False)


def test_a_pause_waits_for_running_requests(server: Server, pool: ThreadPoolExecutor) -> None:
    expected = tokens(start(server, pool))
    running = start_running(server, pool)
    pause = pool.submit(post, server, "/pause?mode=wait")
    wait_for_state(server, is_paused=True)
    late = start(server, pool)
    assert pause.result() == {"status": "paused"}
    assert all(each.done() or each.result() for each in running)
    assert tokens(running) == expected
    time.sleep(LONGER_S)
    assert not any(each.done() for each in late)
    post(server, "/resume")
    assert tokens(late) == expected


@pytest.mark.parametrize("path", ["/pause", "/pause_generation"])
def test_a_pause_aborts_by_default(server: Server, pool: ThreadPoolExecutor, path: str) -> None:
    running = start_running(server, pool, 4000)
    post(server, path, {})
    for each in running:
        status, answer = each.result()
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")
    late = start(server, pool, 5)
    post(server, "/continue_generation" if path == "/pause_generation" else "/resume", {})
    assert [len(each) for each in tokens(late)] == [5] * NUM_REQUESTS


def test_retracted_requests_are_computed_again(server: Server, pool: ThreadPoolExecutor) -> None:
    expected = tokens(start(server, pool))
    before = server.metric("engine:num_preemptions_total")
    running = start_running(server, pool)
    post(server, "/pause_generation", {"mode": "retract"})
    assert not any(each.done() for each in running)
    post(server, "/continue_generation", {})
    assert tokens(running) == expected
    wait_until(
        lambda: server.metric("engine:num_preemptions_total") > before, what="requests gave up"
    )


@pytest.mark.parametrize("title", ["core 0", "frontend 0"])
def test_an_engine_stays_paused_after_a_crash(
    server: Server, pool: ThreadPoolExecutor, title: str
) -> None:
    expected = tokens(start(server, pool))
    post(server, "/pause?mode=keep")
    wait_for_state(server, is_paused=True)
    server.child(title).kill()
    # A request through the killed frontend would get no answer.
    server.wait_until_whole()
    wait_for_state(server, is_paused=True)
    running = start(server, pool)
    wait_until(
        lambda: server.get("/load")[1]["server_load"] == NUM_REQUESTS, what="the requests wait"
    )
    wait_until_waiting(server)
    time.sleep(LONGER_S)
    assert not any(each.done() for each in running)
    post(server, "/resume")
    assert tokens(running) == expected


@pytest.mark.parametrize("title", ["core 0", "frontend 0"])
def test_waiting_requests_are_counted_again_after_a_crash(
    server: Server, pool: ThreadPoolExecutor, title: str
) -> None:
    post(server, "/pause?mode=keep")
    wait_for_state(server, is_paused=True)
    waiting = start(server, pool, 5)
    wait_until_waiting(server)
    victim = server.child(title)
    victim.kill()
    wait_until(lambda: server.child(title) != victim, what="there is another one")
    server.wait_until_whole()

    def are_counted() -> bool:
        # A killed frontend has lost its requests.
        num_left = sum(not each.done() for each in waiting)
        return server.metric("engine:num_requests_waiting") == num_left

    wait_until(are_counted, what="metrics count")
    post(server, "/resume")


def test_a_frontend_that_restarts_before_a_pause_becomes_ready() -> None:
    flags = ("--device", "null", "--null-step-ms", "20", "--api-server-count", "2")
    with Server("--model", default_model(), *flags, "--max-num-seqs", "1") as server:
        with server.sending("/v1/completions", {"prompt": [5], "max_tokens": 4000}) as client:
            wait_until(lambda: server.metric("engine:num_requests_running") == 1, what="it runs")
            holder = server.frontend_of(client)
            (other,) = {server.child("frontend 0"), server.child("frontend 1")} - {holder}
            other.kill()
            wait_until(
                lambda: server.metric("engine:num_requests_waiting") == 1,
                what="the next frontend waits for its first token",
            )
            post(server, "/pause?mode=keep")
            server.wait_until_whole()
        wait_until(
            lambda: server.metric("engine:num_requests_waiting") == 0, what="it waits no longer"
        )


def test_wrong_modes_are_refused(server: Server) -> None:
    for path, body in (("/pause?mode=x", b""), ("/pause_generation", {"mode": "x"})):
        status, answer = server.post(path, body)
        assert (status, answer["error"]["param"]) == (400, "mode")
    status, answer = server.post("/pause?clear_cache=maybe", b"")
    assert (status, answer["error"]["param"]) == (400, "clear_cache")


def test_a_paused_server_drains(pool: ThreadPoolExecutor) -> None:
    flags = ("--device", "null", "--null-step-ms", "2")
    with Server("--model", default_model(), *flags) as server:
        post(server, "/pause?mode=keep")
        waiting = start(server, pool, 20)
        wait_until(
            lambda: server.get("/load")[1]["server_load"] == NUM_REQUESTS, what="requests wait"
        )
        assert server.stop() == 0
        assert [len(each) for each in tokens(waiting)] == [20] * NUM_REQUESTS


def states(server: Server) -> set[str]:
    return {each["state"] for each in server.get("/replicas")[1]["replicas"]}


def wait_until_asleep(server: Server) -> None:
    """Wait until both frontends know that the model is unloaded."""
    wait_until(
        lambda: all(server.get("/props")[1]["is_sleeping"] for _ in range(8)), what="both know"
    )


def test_kept_requests_continue_after_the_sleep(server: Server, pool: ThreadPoolExecutor) -> None:
    expected = tokens(start(server, pool))
    running = start_running(server, pool)
    assert post(server, "/sleep?level=0&mode=keep") == {"status": "sleeping", "level": 0}
    assert post(server, "/release_kv_cache_memory") == {"status": "kv_cache_released"}
    titles = {title_of(child).split()[0] for child in server.find_children()}
    assert not titles & {"core", "worker"} and states(server) == {"sleeping"}
    wait_until_asleep(server)
    assert server.get("/is_sleeping") == (200, {"is_sleeping": True})
    # Load balancers choose another server, but nothing restarts this one.
    assert server.get("/health")[0] == 200 and server.get("/readyz")[0] == 503
    server.child("supervisor").kill()
    late = start(server, pool)
    woken = post(server, "/wake_up?tags=weights")
    assert woken == {"status": "sleeping", "tags": ["weights"]}
    assert server.get("/is_sleeping") == (200, {"is_sleeping": True})
    assert not any(each.done() for each in running + late)
    post(server, "/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert tokens(running) == expected == tokens(late)
    assert states(server) == {"serving"}


def test_the_next_request_loads_an_unloaded_model(server: Server, pool: ThreadPoolExecutor) -> None:
    expected = tokens(start(server, pool))
    model = server.get("/v1/models")[1]["data"][0]["id"]
    answer = post(server, "/api/generate", {"model": model, "keep_alive": 0})
    assert answer["done_reason"] == "unload"
    wait_until_asleep(server)
    assert server.get("/api/ps")[1] == {"models": []}
    server.child("frontend 0").kill()
    server.wait_until_whole()
    assert server.get("/readyz")[0] == 200 and states(server) == {"sleeping"}
    assert tokens(start(server, pool)) == expected
    assert len(server.get("/api/ps")[1]["models"]) == 1


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/sleep?level=3", b"", 'level must be one of 0, 1, 2, got "3"'),
        ("/sleep?mode=nap", b"", 'mode must be one of abort, wait, keep, got "nap"'),
        ("/wake_up?tags=heads", b"", 'got "heads"'),
        ("/release_memory_occupation", {"tags": ["heads"]}, 'got "heads"'),
    ],
)
def test_an_unknown_part_or_mode_is_refused(
    server: Server, path: str, body: Any, message: str
) -> None:
    status, answer = server.post(path, body)
    assert status == 400 and message in answer["error"]["message"]
    assert states(server) == {"serving"}
