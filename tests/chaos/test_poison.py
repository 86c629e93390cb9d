"""A request whose presence kills the worker is found, and the others do not suffer."""

from __future__ import annotations

import threading
from typing import Any

from support.server import Server, default_model

POISON = 49_000
OTHERS = 99


def body(number: int) -> dict[str, Any]:
    return {
        "prompt": [1000 + number, 2000 + number, POISON if number == OTHERS // 2 else 3000],
        "max_tokens": 8,
        "temperature": 0.7,
        "seed": number,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def ask_all(server: Server, numbers: list[int]) -> dict[int, tuple[int, Any]]:
    answers: dict[int, tuple[int, Any]] = {}

    def ask(number: int) -> None:
        answers[number] = server.post("/v1/completions", body(number))

    threads = [threading.Thread(target=ask, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_a_poison_among_100_is_found_within_two_crashes() -> None:
    args = (default_model(), "--max-model-len", "256", "--inject-crash", str(POISON))
    with Server(*args) as server:
        everyone = list(range(OTHERS + 1))
        poison = OTHERS // 2
        healthy = [number for number in everyone if number != poison]
        undisturbed = ask_all(server, healthy)
        answers = ask_all(server, everyone)
        status, answer = answers.pop(poison)
        assert status == 500
        assert "alone when another one did" in answer["error"]["message"]
        assert {number: status for number, (status, _) in answers.items()} == dict.fromkeys(
            healthy, 200
        )
        for number in healthy:
            assert answers[number][1]["choices"] == undisturbed[number][1]["choices"]
        assert server.log.count("was killed by SIGSEGV") == 2, server.log
        assert server.stop() == 0
