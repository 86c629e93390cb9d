"""The start of a frontend that replaces another one, and the token that every start generates first."""

from __future__ import annotations

import concurrent.futures
import time

import pytest
from engine.frontend.api.server import HOLD_BACK_S
from engine.protocol.config import FIRST_EPOCH
from engine.protocol.messages import AddRequests, ClientHello
from support.servers.echo_core import EchoCoreThread
from support.servers.frontend_process import FrontendProcess

pytestmark = pytest.mark.slow

PROMPT = "One two three four five"


def test_a_restarted_frontend_delays_its_not_ready_answer() -> None:
    began = time.monotonic()
    with FrontendProcess(with_core=False, epoch=FIRST_EPOCH + 1) as frontend:
        assert frontend.http.get("/readyz").status_code == 503
        assert time.monotonic() - began >= HOLD_BACK_S
        assert frontend.stop() == 0


def test_requests_to_a_restarted_frontend_wait_for_the_core() -> None:
    with (
        FrontendProcess(with_core=False, epoch=FIRST_EPOCH + 1) as frontend,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(frontend.post, "/v1/completions", prompt=PROMPT)
        assert frontend.http.get("/readyz").status_code == 503
        assert frontend.post("/ping").status_code == 503
        with EchoCoreThread(frontend.config, step_s=0.001):
            assert answer.result().status_code == 200
            frontend.stop()


def warm_ups(frontend: FrontendProcess) -> int:
    return sum(
        len(message.requests)
        for message in frontend.core.received
        if isinstance(message, ClientHello | AddRequests)
    )


def test_the_first_token_is_requested_again_while_the_queue_is_full() -> None:
    frontend = FrontendProcess()
    frontend.core.num_refusals = 2
    with frontend:
        assert warm_ups(frontend) == 3
        assert frontend.http.get("/readyz").status_code == 200


def test_a_restarted_frontend_becomes_ready_while_the_queue_is_full() -> None:
    frontend = FrontendProcess(epoch=FIRST_EPOCH + 1)
    frontend.core.num_refusals = 1000
    with frontend:
        assert warm_ups(frontend) == 1
        assert frontend.http.get("/readyz").status_code == 200
        assert frontend.post("/v1/completions", prompt=PROMPT).status_code == 503
