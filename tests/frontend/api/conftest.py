from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from support.servers.frontend_process import FrontendProcess, sound_frontend

if TYPE_CHECKING:
    import openai


@pytest.fixture(scope="package")
def frontend() -> Iterator[FrontendProcess]:
    """A frontend that tests share, because they leave it unchanged."""
    with sound_frontend(step_s=0.0005) as process:
        yield process


@pytest.fixture(scope="module")
def slow_frontend() -> Iterator[FrontendProcess]:
    """A frontend whose core takes 50 ms for a step."""
    with sound_frontend(step_s=0.05) as process:
        yield process


@pytest.fixture(scope="module")
def client(frontend: FrontendProcess) -> Iterator[openai.OpenAI]:
    with frontend.client() as openai_client:
        yield openai_client
