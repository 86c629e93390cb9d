"""A request whose presence kills the worker is found, and the others do not suffer."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support.faults import environment_with
from support.server import Server, assert_nothing_is_held, default_model

POISON = 49_000
OTHERS = 99


def body(number: int, poison: int = POISON) -> dict[str, Any]:
    return {
        "prompt": [1000 + number, 2000 + number, poison if number == OTHERS // 2 else 3000],
        "max_tokens": 8,
        "temperature": 0.7,
        "seed": number,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def ask_all(server: Server, numbers: list[int], poison: int = POISON) -> dict[int, tuple[int, Any]]:
    answers: dict[int, tuple[int, Any]] = {}

    def ask(number: int) -> None:
        answers[number] = server.post("/v1/completions", body(number, poison))

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


@pytest.mark.parametrize("poison", [49_001, 49_002], ids=["by arriving", "when it is scheduled"])
def test_a_poison_of_which_the_core_dies_without_a_word_fails_alone(poison: int) -> None:
    args = (default_model(), "--device", "null", "--max-model-len", "256", "--api-server-count")
    env = environment_with("poisonous_core")
    with Server(*args, "2", "--null-step-ms", "5", env=env) as server:
        everyone = list(range(OTHERS + 1))
        healthy = [number for number in everyone if number != OTHERS // 2]
        undisturbed = ask_all(server, healthy)
        answers = ask_all(server, everyone, poison)
        status, answer = answers.pop(OTHERS // 2)
        assert status == 500, answer
        assert "alone when another one did" in answer["error"]["message"]
        for number in healthy:
            status, answer = answers[number]
            assert status == 200, answer
            assert answer["choices"] == undisturbed[number][1]["choices"]
        assert server.log.count("was killed by SIGKILL") == 4, server.log
        assert_nothing_is_held(server)
        # Nobody else is there to make progress meanwhile.
        status, answer = server.post("/v1/completions", body(OTHERS // 2, poison))
        assert status == 500 and "alone when" in answer["error"]["message"], answer
        assert server.post("/v1/completions", body(1))[0] == 200
        assert server.stop() == 0, server.log
