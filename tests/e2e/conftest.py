from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from support.servers.server import Server, default_model

MODEL_NAME = "smollm2"


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    """A server of the default model, which tests of this folder share and leave unchanged."""
    flags = ("--served-model-name", MODEL_NAME, "--max-model-len", "2048")
    # An empty PYTHONPATH makes it a new Python process, like the servers of users, instead of a fork.
    with Server(default_model(), *flags, env={"PYTHONPATH": ""}) as s:
        yield s
        assert s.stop() == 0, s.log


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as c:
        yield c
