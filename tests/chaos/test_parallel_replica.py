"""A replica of several workers is restarted as a whole, and its streams do not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.faults import ENVIRONMENT, fail
from support.mixed_streams import Streams, bodies, undisturbed_answers
from support.program import wait_until
from support.server import Server, assert_nothing_is_held
from support.tiny_checkpoints import qwen3_directory

# Without log-probabilities: their last digits depend on the batch where torch multiplies.
REQUESTS = [
    {**body, "max_tokens": 300, "logprobs": None, "prompt_logprobs": None} for body in bodies(10)
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path: Path = qwen3_directory(tmp_path_factory.mktemp("tiny"))[0]
    args = ("--dtype", "float32", "-tp", "2", "--heartbeat-timeout", "3")
    with Server(str(path), *args, env=ENVIRONMENT) as server:
        yield server
        assert server.stop() == 0, server.log


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[dict[str, Any]]:
    return undisturbed_answers(server, REQUESTS)


@pytest.mark.parametrize(
    ("title", "harm", "cause"),
    [
        ("core 0", psutil.Process.kill, "core 0 was killed by SIGKILL"),
        ("worker 0", psutil.Process.kill, "worker 0 was killed by SIGKILL"),
        ("worker 1", psutil.Process.kill, "worker 1 was killed by SIGKILL"),
        ("worker 1", psutil.Process.suspend, "worker 1 has given no sign of life"),
        ("worker 1", fail, "worker 1: RuntimeError: a test asked for this failure"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_streams_survive_and_the_message_names_who_died_first(
    server: Server,
    undisturbed: list[dict[str, Any]],
    title: str,
    harm: Callable[[psutil.Process], None],
    cause: str,
) -> None:
    num_lines = len(server.output)
    streams = Streams(server, REQUESTS)
    streams.wait_for_events(50)
    before = {name: server.child(name) for name in ("core 0", "worker 0", "worker 1")}
    harm(before[title])
    wait_until(lambda: not any(p.is_running() for p in before.values()), what="all restarted")
    assert streams.answers() == undisturbed
    told = [line for line in server.output[num_lines:] if "starting it again" in line]
    assert cause in told[0]
    assert len(told) == 1, told
    assert_nothing_is_held(server)
