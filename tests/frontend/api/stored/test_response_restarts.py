"""Stored responses outlive the processes that wrote them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from engine.protocol.config import StoreConfig
from support.servers.frontend_process import MODEL, FrontendProcess

pytestmark = pytest.mark.slow

TEXT = "One two three four five six seven eight nine ten eleven twelve."
NUM_BEFORE = 5
"""Events that the client receives before the crash."""


@pytest.mark.timeout(120)
def test_background_response_survives_the_death_of_all_processes(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with (
        FrontendProcess(step_s=0.05, store=StoreConfig(path=str(path))) as frontend,
        frontend.client() as client,
    ):
        first = client.responses.create(model=MODEL, input="Hello", max_output_tokens=1)
        num_tokens = len(frontend.tokenizer.encode(TEXT))
        stream = client.responses.create(
            model=MODEL, input=TEXT, background=True, stream=True, max_output_tokens=num_tokens
        )
        before = [next(stream) for _ in range(NUM_BEFORE)]
        frontend.process.kill()
    with (
        FrontendProcess(store=StoreConfig(path=str(path))) as frontend,
        frontend.client() as client,
    ):
        identifier = before[0].response.id
        after = list(
            client.responses.retrieve(identifier, stream=True, starting_after=NUM_BEFORE - 1)
        )
        numbers = [event.sequence_number for event in (*before, *after)]
        assert numbers == list(range(len(numbers)))
        text = "".join(
            event.delta for event in (*before, *after) if event.type == "response.output_text.delta"
        )
        assert text == TEXT == after[-1].response.output_text
        assert client.responses.retrieve(identifier).output_text == TEXT
        second = client.responses.create(
            model=MODEL, input="Two", previous_response_id=first.id, max_output_tokens=1
        )
        items = client.responses.input_items.list(second.id, order="asc").data
        assert [item.content[0].text for item in items] == ["Hello", "Hello", "Two"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("loss", ["UPDATE records SET record = x'90'", "DELETE FROM requests"])
def test_background_response_fails_if_its_record_is_unreadable(tmp_path: Path, loss: str) -> None:
    """Another version may have written the record, which must not leave a response in progress forever."""
    path = tmp_path / "store.sqlite"
    with (
        FrontendProcess(step_s=0.05, store=StoreConfig(path=str(path))) as frontend,
        frontend.client() as client,
    ):
        stream = client.responses.create(
            model=MODEL, input=TEXT, background=True, stream=True, max_output_tokens=50
        )
        before = [next(stream) for _ in range(NUM_BEFORE)]
        frontend.process.kill()
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute(loss)
    with (
        FrontendProcess(store=StoreConfig(path=str(path))) as frontend,
        frontend.client() as client,
    ):
        identifier = before[0].response.id
        after = list(
            client.responses.retrieve(identifier, stream=True, starting_after=NUM_BEFORE - 1)
        )
        assert after[-1].type == "response.failed" and after[-1].response.error.message
        numbers = [event.sequence_number for event in (*before, *after)]
        assert numbers == list(range(len(numbers)))
        assert client.responses.retrieve(identifier).status == "failed"
