"""A KV connector that lies, hangs or crashes changes no token of any request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes.program import wait_until
from support.servers.faulty_connector import BLOCK_SIZE, Plan
from support.servers.server import Server, assert_nothing_is_held, default_model

TESTS = Path(__file__).parents[2]


class FaultyServer(Server):
    """A server whose connector follows the file `plan`."""

    def __init__(self, plan: Path, *args: str) -> None:
        self.plan = plan
        config = {
            "kv_connector": "Faulty",
            "kv_connector_module_path": "support.servers.faulty_connector",
            "kv_connector_extra_config": {"plan": str(plan)},
            "load_timeout_s": 2,
        }
        super().__init__(
            *(default_model(), "--max-model-len", "512", "--block-size", str(BLOCK_SIZE)),
            *("--kv-transfer-config", json.dumps(config), *args),
            env={"PYTHONPATH": str(TESTS)},
        )

    def ask(self, prompt: str) -> tuple[int, str]:
        """Return the status, and the text or the error's message."""
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        status, answer = self.post("/v1/completions", body)
        if status == 200:
            return status, answer["choices"][0]["text"]
        return status, answer["error"]["message"]


@pytest.fixture(params=[(), ("--kv-cache-dtype", "int8")], ids=["bfloat16", "int8"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FaultyServer]:
    with FaultyServer(tmp_path / "plan", *request.param) as server:
        yield server


def prompt(number: int) -> str:
    return f"In the year {number}, " + "once upon a time there was a little dog. " * 12


@pytest.mark.parametrize("load", ["synchronous", "asynchronous"])
def test_blocks_full_of_nan_are_computed_although_the_connector_reports_success(
    server: FaultyServer, load: str
) -> None:
    """Neither the requests, nor those that get their blocks later, see the NaN."""
    expected = [server.ask(prompt(number)) for number in range(3)]
    assert {status for status, _ in expected} == {200}
    status, _ = server.post("/reset_prefix_cache", {})
    assert status == 200
    Plan(load).write(server.plan)  # type: ignore[arg-type]
    assert [server.ask(prompt(number)) for number in range(3)] == expected
    failed = server.metric("engine:kv_transfer_failed_loads_total")
    assert failed == 3
    # The blocks are found in the prefix cache now.
    assert [server.ask(prompt(number)) for number in range(3)] == expected
    Plan("none").write(server.plan)
    assert server.post("/reset_prefix_cache", {})[0] == 200
    assert [server.ask(prompt(number)) for number in range(3)] == expected
    assert "has loaded NaN or infinity" in server.log
    assert server.metric("engine:corrupted_requests_total") == 0
    assert_nothing_is_held(server)


OF_ONE_REQUEST = (
    "Faulty.get_num_new_matched_tokens",
    "Faulty.update_state_after_alloc",
    "Faulty.request_finished",
)
OF_ALL = (
    "Faulty.build_connector_meta",
    "Faulty.needs_step",
    "FaultyWorker.begin_step",
    "FaultyWorker.start_loads",
    "FaultyWorker.end_step",
    "FaultyWorker.take_reports",
)


HANGS = ("Faulty.needs_step", "FaultyWorker.begin_step", "FaultyWorker.take_reports")
"""A call in the core, one within a step of a worker, and one between steps."""


@pytest.mark.parametrize("fault", ["raise", "exit", "hang"])
def test_a_call_that_fails_changes_no_token(tmp_path: Path, fault: str) -> None:
    """An error that concerns a request fails it; after any other fault, it is computed."""
    timeouts = ("--heartbeat-timeout", "10", "--step-timeout", "10") if fault == "hang" else ()
    with FaultyServer(tmp_path / "plan", "--max-restarts", "100", *timeouts) as server:
        for number, call in enumerate(HANGS if fault == "hang" else (*OF_ONE_REQUEST, *OF_ALL)):
            Plan("asynchronous", call, fault).write(server.plan)  # type: ignore[arg-type]
            first = server.ask(prompt(number))
            wait_until(lambda: not json.loads(server.plan.read_text()).get("call"), what=call)
            server.wait_until_whole()
            Plan("none").write(server.plan)
            second = server.ask(prompt(number))
            assert second[0] == 200, (call, second)
            if fault == "raise" and call in OF_ONE_REQUEST:
                assert first == (500, "KV connector: the planned fault"), call
            else:
                assert first == second, call
        assert_nothing_is_held(server)
