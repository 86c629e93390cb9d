"""Background responses on a server with several frontends. A connection may reach any of them."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from support.servers.server import Server, default_model

NUM_CONNECTIONS = 8


@pytest.fixture(scope="module")
def servers() -> Iterator[Server]:
    args = (
        "--served-model-name",
        "smollm2",
        "--device",
        "null",
        "--null-step-ms",
        "20",
        "--api-server-count",
        "2",
    )
    with Server(default_model(), *args, "--max-model-len", "4096") as server:
        yield server
        assert server.stop() == 0, server.log


def connect(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_any_frontend_streams_the_events_of_a_background_response(servers: Server) -> None:
    with connect(servers) as client:
        stream = client.responses.create(
            model="smollm2", input="Hi", background=True, stream=True, max_output_tokens=60
        )
        first = next(stream)
        others = []
        for _ in range(NUM_CONNECTIONS):
            other = connect(servers)
            others.append(
                other.responses.retrieve(first.response.id, stream=True, starting_after=0)
            )
        rest = list(stream)
        assert rest[-1].type == "response.incomplete"
        for events in others:
            assert list(events) == rest


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_any_frontend_can_cancel_a_background_response(servers: Server) -> None:
    for _ in range(4):
        with connect(servers) as client:
            response = client.responses.create(
                model="smollm2", input="Hi", background=True, max_output_tokens=3000
            )
        with connect(servers) as client:
            assert client.responses.cancel(response.id).status == "cancelled"
