"""A prefill replica and a decode replica: long prompts are computed by the first, whatever happens to it.

When the second one drains, or becomes a prefill replica, its streams continue at the first.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from support.processes.program import wait_until
from support.requests.mixed_streams import Streams
from support.servers.server import Server, assert_nothing_is_held, default_model

pytestmark = pytest.mark.rotated

PREFILL, DECODE = "0", "1"
NUM_TOKENS = 405


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    args = ("--replica-roles", "prefill=1,decode=1", "--enable-prompt-tokens-details")
    # Small steps, so that blocks move while the prompt is being computed.
    limits = ("--max-model-len", "1024", "--max-num-batched-tokens", "64", "--max-num-seqs", "8")
    limits += ("--heartbeat-timeout", "60")
    # Unused places for drafts would count as computed tokens.
    drafts = ("--speculative-config", '{"num_speculative_tokens": 0}')
    with Server(default_model(), *args, *limits, *drafts) as server:
        yield server
        assert_nothing_is_held(server)
        assert server.stop() == 0, server.log


def body_for(first: int) -> dict[str, Any]:
    return {
        "prompt": [first, *((1000 + 7919 * i) % 20_000 for i in range(1, NUM_TOKENS))],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def ask(server: Server, body: dict[str, Any], replica: str | None = None) -> tuple[list[int], int]:
    """Return the tokens, and how many of the prompt were not computed by the replica that generated them."""
    headers = None if replica is None else {"X-data-parallel-rank": replica}
    status, answer = server.post("/v1/completions", body, headers=headers)
    assert status == 200, answer
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["token_ids"], cached


def loaded(server: Server) -> float:
    return server.metric("engine:kv_transfer_hits_total", engine=DECODE)


def test_only_the_prefill_replica_yields_its_processors(server: Server) -> None:
    """No thread of it interrupts one of another process, such as the worker that generates."""
    policies = []
    for replica in (PREFILL, DECODE):
        worker = server.child(f"worker {replica}")
        policies.append({os.sched_getscheduler(thread.id) for thread in worker.threads()})
    assert policies == [{os.SCHED_BATCH}, {os.SCHED_OTHER}]


def test_a_long_prompt_is_computed_by_the_prefill_replica(server: Server) -> None:
    body = body_for(11)
    tokens, cached = ask(server, body)
    # The last block moves too, although it is not full.
    assert cached == NUM_TOKENS - 1
    wait_until(lambda: loaded(server) == cached, what="the tokens are counted")
    assert server.metric("engine:kv_transfer_received_bytes_total", engine=DECODE) > 0
    assert server.metric("engine:kv_transfer_failed_loads_total") == 0
    # The other replica has the blocks of the prompt, and the last of them is computed again.
    assert ask(server, body, PREFILL)[0] == tokens
    # Tokens that are cached on the decode replica are not computed elsewhere.
    assert ask(server, body)[0] == tokens
    assert loaded(server) == cached


def test_a_prefill_replica_that_is_killed_costs_time_only(server: Server) -> None:
    body = body_for(12)
    answers: list[tuple[list[int], int]] = []
    before = server.metric("engine:scheduled_tokens_total", engine=PREFILL)
    asking = threading.Thread(target=lambda: answers.append(ask(server, body)))
    asking.start()
    worker = server.child("worker 0")
    wait_until(
        lambda: server.metric("engine:scheduled_tokens_total", engine=PREFILL) > before + 100,
        what="a part of the prompt is computed",
    )
    worker.kill()
    asking.join()
    (answer,) = answers
    server.wait_until_whole()
    # A frontend may learn a moment later than the status that the replica is ready.
    short, headers = body | {"max_tokens": 1}, {"X-data-parallel-rank": PREFILL}
    wait_until(
        lambda: server.post("/v1/completions", short, headers=headers)[0] == 200,
        what="the prefill replica accepts requests",
    )
    # The next prompt is computed there again, with the same tokens.
    assert answer[0] == ask(server, body, PREFILL)[0]


def test_blocks_for_a_decode_replica_that_is_killed_are_freed(server: Server) -> None:
    """The client leaves while the replica hangs, so its blocks are never fetched."""
    server.wait_until_whole()
    worker = server.child("worker 1")
    worker.suspend()
    parts = urlsplit(server.url)
    data = json.dumps({**body_for(20), "prompt": body_for(20)["prompt"][:300]})
    usage = partial(server.metric, "engine:kv_cache_usage_perc", engine=PREFILL)
    running = partial(server.metric, "engine:num_requests_running", engine=PREFILL)
    with socket.create_connection((parts.hostname, parts.port)) as client:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: {len(data)}\r\n\r\n{data}".encode())
        wait_until(
            lambda: (usage() > 0 and not running()) or not worker.is_running(),
            what="the blocks are held",
        )
    with contextlib.suppress(psutil.NoSuchProcess):
        # On a slow machine, the supervisor may have killed it before.
        worker.kill()
    wait_until(lambda: not usage(), 20, what="the blocks are freed")
    server.wait_until_whole()
    assert server.metric("engine:kv_transfer_expired_total") == 0


STREAM: dict[str, Any] = {
    "prompt": [(1000 + 7919 * i) % 20_000 for i in range(100)],
    "max_tokens": 400,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


def stream_and_leave(server: Server, body: dict[str, Any], action: str) -> dict[str, Any]:
    """Return the answer of a stream of the decode replica, which must leave it while it runs."""
    streams = Streams(server, [body], headers={"X-data-parallel-rank": DECODE})
    wait_until(lambda: streams.num_events > 8, 120, what="the stream runs")
    with server.suspended_workers():
        status, info = server.post(f"/replicas/{DECODE}/{action}", {})
    assert status == 200, info
    (answer,) = streams.answers()
    return answer


def state(server: Server) -> str:
    found: str = server.get("/replicas")[1]["replicas"][int(DECODE)]["state"]
    return found


def test_streams_leave_a_replica_with_their_blocks(server: Server) -> None:
    server.wait_until_whole()
    body = STREAM
    prompt_tokens = len(body["prompt"])
    (alone,) = Streams(server, [body], headers={"X-data-parallel-rank": DECODE}).answers()
    before = server.metric("engine:kv_transfer_hits_total", engine=PREFILL)
    computed = server.metric("engine:scheduled_tokens_total", engine=PREFILL)
    assert stream_and_leave(server, body, "drain") == alone
    wait_until(lambda: state(server) == "drained", what="the replica is drained")
    moved = server.metric("engine:kv_transfer_hits_total", engine=PREFILL) - before
    # All full blocks of the prompt, and of the output so far, were moved.
    assert moved >= prompt_tokens // 16 * 16
    computed = server.metric("engine:scheduled_tokens_total", engine=PREFILL) - computed
    assert computed < prompt_tokens + 400 - moved + 16
    assert server.post(f"/replicas/{DECODE}/undrain", {})[1]["state"] == "serving"


def test_roles_change_while_a_stream_runs(server: Server) -> None:
    body = STREAM | {"prompt": STREAM["prompt"][::-1], "max_tokens": 250}
    # The last replica that generates tokens must not become another one for prompts.
    assert server.post(f"/replicas/{DECODE}/prefill", {})[0] == 409
    assert server.post(f"/replicas/{PREFILL}/decode", {})[1]["role"] == "decode"
    before = server.metric("engine:kv_transfer_hits_total", engine=PREFILL)
    answer = stream_and_leave(server, body, "prefill")
    assert server.metric("engine:kv_transfer_hits_total", engine=PREFILL) > before
    assert [answer] == Streams(server, [body], headers={"X-data-parallel-rank": DECODE}).answers()
    assert server.post(f"/replicas/{DECODE}/decode", {})[1]["role"] == "decode"
    assert server.post(f"/replicas/{PREFILL}/prefill", {})[1]["role"] == "prefill"


def test_a_replica_that_is_killed_while_it_drains_costs_time_only(server: Server) -> None:
    body = STREAM | {"max_tokens": 100}
    (alone,) = Streams(server, [body], headers={"X-data-parallel-rank": PREFILL}).answers()
    worker = server.child("worker 1")
    streams = Streams(server, [body], headers={"X-data-parallel-rank": DECODE})
    wait_until(lambda: streams.num_events > 8, 120, what="the stream runs")
    assert server.post(f"/replicas/{DECODE}/drain", {})[0] == 200
    worker.kill()
    assert streams.answers() == [alone]
    server.wait_until_whole()
    assert server.post(f"/replicas/{DECODE}/undrain", {})[1]["state"] == "serving"
