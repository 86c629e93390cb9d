"""Tokens are delivered when they are durable: in the journal, or committed by the store."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path

import msgspec
import pytest
from engine.frontend.client.engine_client import RequestGroup, Sequence
from engine.frontend.store import token_log
from engine.frontend.store.entries import merge_entries
from engine.frontend.store.journal import HALF_BYTES, Journal, read_journal
from engine.frontend.store.token_log import TokenLog
from engine.protocol.messages import EngineCoreOutputs, EngineCoreRequest
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.store.requests import LogEntry, LogTokens
from support.servers.engine_fixtures import on_event_loop


def ints(*values: int) -> bytes:
    return array("i", values).tobytes()


class Log:
    """The log of a frontend, and the messages that it has sent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sent: list[msgspec.Struct] = []
        self.delivered: list[bytes] = []
        self.log = TokenLog(self.sent.append, "run", 0, lambda session: Journal(path), holds=True)
        self.log.greet()
        self.log.record_opened(0)
        self.sent.clear()

    @property
    def entries(self) -> list[LogEntry]:
        return list(read_journal(self.path))

    def begin(self, name: str, record: bytes = b"record") -> None:
        request = EngineCoreRequest(1, ints(1), SamplingParams(), arrival_time=0.0)
        sequence = Sequence(request, SamplingParams(), 1, None)
        group = RequestGroup(
            name,
            [sequence],
            [1],
            stream_interval=1,
            on_abort=lambda group: None,
            wake_soon=lambda group: None,
        )
        self.log.begin(group, name, "a", record)

    def append(self, token: int) -> None:
        outputs = EngineCoreOutputs(0, 0, 0.0, request_indices=ints(1), token_ids=ints(token))
        self.log.append(outputs, lambda outputs: self.delivered.append(outputs.token_ids))


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "journal")


@on_event_loop
async def test_tokens_are_delivered_when_they_are_in_the_journal(log: Log) -> None:
    log.begin("x")
    log.append(10)
    # The store does not know the session yet.
    assert log.delivered == [] and len(log.sent) == 2
    log.log.acknowledge(2)
    assert log.delivered == [ints(10)] and log.entries == []
    for token in (11, 12, 13):
        log.append(token)
    assert log.delivered == [ints(10), ints(11), ints(12), ints(13)]
    assert [entry.number for entry in log.entries] == [3, 4, 5]
    # The store receives them together.
    assert len(log.sent) == 2
    await asyncio.sleep(token_log.BATCH_S * 1.5)
    assert log.sent[2:] == [LogTokens(5, ints(1), ints(11, 12, 13), ints(3))]
    log.log.acknowledge(5)
    assert log.entries == []


@on_event_loop
async def test_tokens_wait_for_the_store_while_the_journal_has_no_room(log: Log) -> None:
    log.begin("x")
    log.log.acknowledge(1)
    log.append(10)
    log.begin("y", bytes(HALF_BYTES))
    log.append(11)
    assert log.delivered == [ints(10)]
    # Later entries are not in the journal while it lacks an earlier one.
    assert [entry.number for entry in log.entries] == [2]
    assert [entry.number for entry in log.sent] == [1, 2, 3, 4]  # type: ignore[attr-defined]
    log.log.acknowledge(4)
    log.append(12)
    assert log.delivered == [ints(10), ints(11), ints(12)]


def test_a_journal_keeps_the_entries_that_are_not_committed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    entries = [LogTokens(number, ints(1), ints(number)) for number in range(1, 5)]
    for _ in range(3):
        assert journal.keep(entries[:2])
        assert all(map(journal.append, entries[2:]))
        assert list(read_journal(tmp_path / "journal")) == entries
    assert not journal.append(LogTokens(5, bytes(HALF_BYTES), b""))
    assert list(read_journal(tmp_path / "journal")) == entries
    journal.close(is_complete=True)
    assert list(read_journal(tmp_path / "journal")) == []


def test_merged_steps_have_the_tokens_of_each_stream_in_order() -> None:
    steps = [LogTokens(number, ints(7, 8), ints(number, 10 + number)) for number in range(1, 4)]
    other = LogTokens(4, ints(7), ints(4))
    drafts = LogTokens(5, ints(7, 8), ints(5, 6, 15), ints(2, 1))
    merged = LogTokens(3, ints(7, 8), ints(1, 2, 3, 11, 12, 13), ints(3, 3))
    assert list(merge_entries([*steps, other, drafts])) == [merged, other, drafts]
