"""Logs and metrics of a server's scheduler."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.processes.program import wait_until
from support.servers.server import Server, default_model

SMALL = (
    *("--model", default_model(), "--device", "null", "--null-step-ms", "1"),
    *("--num-gpu-blocks-override", "12", "--max-model-len", "128", "--log-stats-interval", "0.5"),
)


def overload(server: Server) -> None:
    """Run more concurrent requests than fit in the KV cache."""
    body = {"max_tokens": 100, "ignore_eos": True}
    with ThreadPoolExecutor(4) as pool:
        answers = [
            pool.submit(server.post, "/v1/completions", {"prompt": [n + 10] * 20, **body})
            for n in range(4)
        ]
    assert {answer.result()[0] for answer in answers} == {200}


@pytest.mark.parametrize("is_quiet", [False, True])
def test_preemption_advice_and_statistics_are_logged_unless_disabled(
    is_quiet: bool,
) -> None:
    with Server(*SMALL, *(["--disable-log-stats"] if is_quiet else [])) as server:
        overload(server)
        wait_until(lambda: "the KV cache is full" in server.log, what="advice on preemption")
        if is_quiet:
            assert "generated tokens/s" not in server.log
        else:
            pattern = r"core 0: replica 0: [1-9]\S* computed tokens/s, \S+ prompt tokens/s, [1-9]\S* generated tokens/s"
            wait_until(lambda: re.search(pattern, server.log), what="a line of statistics")
        assert server.metric("engine:request_scheduler_time_seconds_count") >= 4
        assert server.metric("engine:request_scheduler_time_seconds_sum") > 0


def test_a_server_runs_with_a_custom_scheduler_class() -> None:
    python_path = {"PYTHONPATH": f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"}
    name = "support.scheduler.custom_schedulers.Wrapper"
    with Server(*SMALL, "--scheduler-cls", name, env=python_path) as server:
        overload(server)
        server.child("core 0").send_signal(signal.SIGUSR1)
        wait_until(
            lambda: f"--scheduler-cls {name} has no event log" in server.log, what="a reason"
        )
        overload(server)
    with Server(
        *SMALL, "--scheduler-cls", "support.scheduler.custom_schedulers.Gone", wait=False
    ) as server:
        assert server.process.wait(60) != 0
        assert (
            "--scheduler-cls support.scheduler.custom_schedulers.Gone cannot be loaded"
            in server.log
        )
