"""Suspected requests run one at a time after a worker crash, and only the one that crashes again fails."""

from __future__ import annotations

import threading
from typing import Any

from support.processes.program import wait_until
from support.servers.server import Server, assert_nothing_is_held, default_model


def test_a_second_crash_fails_only_the_suspected_request_that_ran() -> None:
    body = {"prompt": [5, 6], "max_tokens": 1, "seed": 7, "return_token_ids": True}
    with Server(default_model(), "--device", "null", "--null-step-ms", "1500") as server:
        # Afterwards the same request would be rejected as a known poison request.
        undisturbed = server.post("/v1/completions", body)[1]["choices"]
        answers: list[tuple[int, Any]] = []

        def ask() -> None:
            answers.append(server.post("/v1/completions", body))

        def await_running(*possible: int) -> None:
            def is_so() -> bool:
                processes = server.get("/engine/status")[1]["processes"]
                core = next(process for process in processes if process["name"] == "core 0")
                num_running = core["num_running"]
                return num_running in possible and num_running + core["num_waiting"] == 3

            wait_until(is_so, what=f"{possible} of the requests run")

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        # Two steps are in flight. Requests that arrived too late for them wait, and are not suspected.
        await_running(2, 3)
        server.child("worker 0").kill()
        await_running(1)
        assert answers == []
        server.child("worker 0").kill()
        for thread in threads:
            thread.join()
        answers.sort(key=lambda answer: answer[0])
        assert [status for status, _ in answers] == [200, 200, 500]
        assert "alone when another one crashed" in answers[2][1]["error"]["message"]
        assert [answer["choices"] for _, answer in answers[:2]] == [undisturbed] * 2
        assert_nothing_is_held(server)
        assert server.stop() == 0, server.log
