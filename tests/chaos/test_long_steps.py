"""A step may take longer than the heartbeat timeout without counting as a hang."""

from __future__ import annotations

import threading
from typing import Any

from support.servers.server import Server, default_model

STEP_MS, HEARTBEAT_TIMEOUT_S = 4000, 2


def test_a_long_step_keeps_the_server_healthy_and_restarts_nothing() -> None:
    args = ("--device", "null", "--null-step-ms", str(STEP_MS))
    limit = ("--heartbeat-timeout", str(HEARTBEAT_TIMEOUT_S))
    with Server(default_model(), *args, *limit) as server:
        before = {child.pid for child in server.find_children()}
        answers: list[tuple[int, Any]] = []

        def ask() -> None:
            answers.append(server.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 1}))

        def busy_s() -> float:
            processes = server.get("/engine/status")[1]["processes"]
            return max(process["busy_s"] for process in processes if "worker" in process["name"])

        thread = threading.Thread(target=ask)
        thread.start()
        longest_s = 0.0
        while not answers:
            longest_s = max(longest_s, busy_s())
            for path in ("/readyz", "/health", "/livez"):
                status, health = server.get(path)
                assert status == 200, health
        thread.join()
        assert longest_s > HEARTBEAT_TIMEOUT_S
        assert answers[0][0] == 200, answers
        assert before <= {child.pid for child in server.find_children()}
        assert "restarting it" not in server.log
        assert server.stop() == 0, server.log
