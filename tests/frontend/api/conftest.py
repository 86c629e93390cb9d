from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from support.frontend_process import FrontendProcess


@pytest.fixture(scope="module")
def frontend() -> Iterator[FrontendProcess]:
    """A frontend that the tests of a file share, because they leave it unchanged."""
    with FrontendProcess(step_s=0.0005) as process:
        yield process
        assert process.stop() == 0, process.log
        assert "Traceback" not in process.log, process.log


@pytest.fixture(scope="module")
def client(frontend: FrontendProcess) -> Iterator[openai.OpenAI]:
    with frontend.client() as openai_client:
        yield openai_client
