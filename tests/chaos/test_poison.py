"""A request that crashes the worker is identified, and the others are not affected."""

from __future__ import annotations

import threading
from typing import Any

import openai
import pytest
from support.checkpoints.shallow_model import shallow_model
from support.processes.faults import environment_with
from support.processes.program import wait_until
from support.requests.mixed_streams import Streams
from support.servers.server import Server, assert_nothing_is_held

pytestmark = pytest.mark.rotated

POISON = 49_000
OTHERS = 99
NO_MODEL = (shallow_model(), "--device", "null", "--null-step-ms", "5", "--max-model-len", "256")


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


def test_a_poison_request_among_100_is_found_within_two_crashes() -> None:
    args = (shallow_model(), "--max-model-len", "256", "--inject-crash", str(POISON))
    with Server(*args) as server:
        everyone = list(range(OTHERS + 1))
        poison = OTHERS // 2
        healthy = [number for number in everyone if number != poison]
        undisturbed = ask_all(server, healthy)
        answers = ask_all(server, everyone)
        status, answer = answers.pop(poison)
        assert status == 500
        assert "alone when another one crashed" in answer["error"]["message"]
        assert {number: status for number, (status, _) in answers.items()} == dict.fromkeys(
            healthy, 200
        )
        for number in healthy:
            assert answers[number][1]["choices"] == undisturbed[number][1]["choices"]
        assert server.log.count("was killed by SIGSEGV") == 2, server.log
        assert server.stop() == 0


KILLED = "core 0 was killed by SIGKILL"
RAISED = "core 0: RuntimeError: a test asked for this failure"


def several_sequences(poison: int) -> list[dict[str, Any]]:
    return [{"prompt": [[prompt, poison] for prompt in range(2, 4)], "n": 3}]


@pytest.mark.parametrize(
    ("poison", "death"),
    [(49_002, KILLED), (49_003, RAISED)],
    ids=["killed in a step", "raising at arrival"],
)
def test_a_poison_request_that_crashes_the_core_silently_fails_alone(
    poison: int, death: str
) -> None:
    env = environment_with("poisonous_core")
    with Server(*NO_MODEL, "--api-server-count", "2", env=env) as server:
        everyone = list(range(OTHERS + 1))
        healthy = [number for number in everyone if number != OTHERS // 2]
        undisturbed = ask_all(server, healthy)
        answers = ask_all(server, everyone, poison)
        status, answer = answers.pop(OTHERS // 2)
        assert status == 500, answer
        assert "alone when another one crashed" in answer["error"]["message"]
        for number in healthy:
            status, answer = answers[number]
            assert status == 200, answer
            assert answer["choices"] == undisturbed[number][1]["choices"]
        assert server.log.count(death) == 4, server.log
        assert_nothing_is_held(server)
        # No other request can make progress meanwhile. A request that raises an error differs only in the message.
        asked = several_sequences(poison) if death == KILLED else []
        for fields in asked:
            status, answer = server.post("/v1/completions", {"max_tokens": 8, **fields})
            assert status == 500 and "alone when" in answer["error"]["message"], answer
        assert server.post("/v1/completions", body(1))[0] == 200
        assert server.log.count(death) == 4 + 4 * len(asked), server.log
        assert server.stop() == 0, server.log


def test_a_request_that_the_core_cannot_process_fails_without_a_crash() -> None:
    with Server(*NO_MODEL, env=environment_with("poisonous_core")) as server:
        pid = server.child("core 0").pid
        answers = ask_all(server, list(range(OTHERS + 1)), 49_005)
        status, answer = answers.pop(OTHERS // 2)
        assert status == 500 and "asked for this failure" in answer["error"]["message"]
        assert {status for status, _ in answers.values()} == {200}
        assert server.child("core 0").pid == pid
        assert_nothing_is_held(server)
        assert server.stop() == 0, server.log


def test_a_poison_request_crashes_two_workers_however_often_it_is_sent() -> None:
    with (
        Server(*NO_MODEL, "--inject-crash", str(POISON)) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="unused") as client,
    ):
        model = client.models.list().data[0].id
        requests = [
            *several_sequences(POISON),
            {"prompt": [7, POISON]},
            {"prompt": [8, POISON], "n": 5, "stream": True},
        ]
        for number, fields in enumerate(requests, 1):
            for _ in range(2):
                with pytest.raises(openai.InternalServerError, match="alone when") as raised:
                    client.completions.create(model=model, **fields)
                assert raised.value.response.headers["x-should-retry"] == "false"
            wait_until(
                lambda deaths=2 * number: server.log.count("SIGSEGV") >= deaths,
                what="every crash is reported",
            )
        assert client.completions.create(model=model, prompt=[9, 9]).choices
        assert server.log.count("was killed by SIGSEGV") == 2 * len(requests), server.log
        assert_nothing_is_held(server)
        assert server.stop() == 0


def test_an_engine_that_crashes_on_every_request_exits() -> None:
    args = (*NO_MODEL, "--inject-crash", str(POISON), "--max-restarts", "2")
    with Server(*args) as server:
        for prompt in range(3):
            assert server.post("/v1/completions", {"prompt": [prompt, POISON]})[0] == 500
        assert server.post("/v1/completions", {"prompt": [3, POISON]})[0] == 500
        assert server.wait() == 1
        assert "Stopping the server: core 0 crashed 3 times in a row" in server.log


def test_a_crash_after_a_token_does_not_count_as_consecutive() -> None:
    with Server(*NO_MODEL, "--null-step-ms", "50", "--max-restarts", "1") as server:
        request = {"prompt": "Once", "max_tokens": 150, "ignore_eos": True, "stream": True}
        streams = Streams(server, [request])
        streams.wait_for_events(1)
        for _ in range(2):
            victim = server.child("worker 0")
            victim.kill()

            def is_replaced(before: int = victim.pid) -> bool:
                processes = server.get("/engine/status")[1]["processes"]
                [worker] = [process for process in processes if process["name"] == "worker 0"]
                return worker["stage"] == "ready" and worker["pid"] != before

            wait_until(is_replaced, 40, what="there is another worker")
            streams.wait_for_events(1)
        [answer] = streams.answers()
        assert "done" in answer and "error" not in answer, answer
        assert server.stop() == 0, server.log
