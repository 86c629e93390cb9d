"""Requests have one owner at a time, and their tokens survive a stop of the store at any point."""

from __future__ import annotations

import fcntl
import os
import random
from array import array
from pathlib import Path

import msgspec
import pytest
from engine.frontend.store import database, requests
from engine.frontend.store.database import Database
from engine.frontend.store.journal import Journal
from engine.frontend.store.requests import Requests
from engine.protocol.messages import FinishedRequest, FinishReason, TokenLogprobs
from engine.protocol.store.requests import (
    AdoptRequest,
    BeginRequest,
    ClaimRequests,
    EndStream,
    LogEntry,
    LogTokens,
    MoveStream,
    OpenSession,
    ReserveKey,
    StreamEnd,
    StreamState,
    TakeDuty,
)

RUN = "/run/engine-1"


def ints(*values: int) -> bytes:
    return array("i", values).tobytes()


def tokens_of(states: list[StreamState]) -> list[list[int]]:
    return [array("i", state.tokens).tolist() for state in states]


class Store:
    """The requests in a file, which can be opened again as after a crash."""

    def __init__(self, path: Path, run: str = RUN) -> None:
        self._path = path
        self._run = run
        self.database = Database(str(path))
        self.requests = Requests(self.database, run, lambda session: Path(run, session.hex()))

    def reopen(self, run: str | None = None) -> Store:
        self.database.close()
        return Store(self._path, run or self._run)

    def commit(self) -> bool:
        if not self.database.write(self.requests.write):
            self.requests.record_lost_write()
            return False
        self.requests.record_write()
        return True

    def apply(self, session: bytes, *entries: LogEntry) -> None:
        for entry in entries:
            self.requests.apply(session, entry)
        assert self.commit()

    def open_session(self, session: bytes, client_index: int = 0, run: str = "") -> int:
        message = OpenSession(session, run or self._run, client_index)
        return self.requests.open_session(message, b"f%d" % client_index)

    def claim(self, session: bytes) -> list[tuple[str, int]]:
        reply = self.requests.claim(session, ClaimRequests(1, 100))
        assert self.commit()
        return [(each.request_id, each.num_starts) for each in reply.requests]

    def tokens(self, name: str) -> list[list[int]]:
        request = self.requests.live.by_name.get(("a", name))
        states = self.requests.find_finished("a", name) if request is None else request.states
        assert states is not None, name
        return tokens_of(states)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store.db")


def begin(number: int, name: str, *streams: int, key: str = "") -> BeginRequest:
    return BeginRequest(number, name, "a", ints(*streams), b"record of " + name.encode(), key)


def test_entries_of_a_journal_are_applied_when_the_session_ends(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.db", str(tmp_path))
    store.open_session(b"s")
    sent = [begin(1, "x", 1), LogTokens(2, ints(1), ints(10))]
    store.apply(b"s", *sent)
    journal = Journal(tmp_path / b"s".hex())
    end = StreamEnd(2, int(FinishReason.LENGTH))
    for entry in (*sent, LogTokens(3, ints(1), ints(11)), begin(4, "y", 2), EndStream(5, 1, end)):
        assert journal.append(entry)
    # The store stops as well, and its next process gets a successor of the frontend.
    store = store.reopen()
    assert store.requests.find_finished("a", "x") is None
    store.open_session(b"t")
    assert store.claim(b"t") == []
    assert store.claim(b"t") == [("y", 1)]
    finished = store.requests.find_finished("a", "x")
    assert finished is not None and tokens_of(finished) == [[10, 11]]
    assert not (tmp_path / b"s".hex()).exists()


def test_an_entry_that_is_sent_again_is_applied_once(store: Store) -> None:
    store.open_session(b"s", 0)
    entries: list[LogEntry] = [
        begin(1, "x", 5, 6),
        LogTokens(2, ints(5, 6, 9), ints(50, 60, 90)),
        MoveStream(3, 5, 7, 0),
        LogTokens(4, ints(6, 7), ints(61, 62, 71), ints(2, 1)),
    ]
    store.apply(b"s", *entries)
    store = store.reopen()
    assert store.open_session(b"s", 0) == 4
    store.apply(b"s", *entries[1:], LogTokens(5, ints(7), ints(72)))
    assert store.tokens("x") == [[71, 72], [60, 61, 62]]


def test_only_the_owner_continues_a_request(store: Store) -> None:
    store.open_session(b"old", 0)
    store.open_session(b"other", 1)
    store.apply(b"old", begin(1, "x", 1), LogTokens(2, ints(1), ints(10)))
    assert store.claim(b"other") == []
    # The same frontend's next process.
    store.open_session(b"new", 0)
    assert store.claim(b"other") == [("x", 1)]
    assert store.claim(b"new") == []
    store.apply(b"old", LogTokens(3, ints(1), ints(66)))
    store.apply(b"new", AdoptRequest(1, "x", "a", ints(3)), LogTokens(2, ints(3), ints(66)))
    store.apply(b"other", AdoptRequest(1, "x", "a", ints(1)), LogTokens(2, ints(1), ints(11)))
    assert store.tokens("x") == [[10, 11]]
    # Another engine, none of whose frontends began it.
    store = store.reopen("/run/engine-2")
    store.open_session(b"next", 0)
    assert store.claim(b"next") == [("x", 1)] and store.tokens("x") == [[10, 11]]


def test_claims_since_the_last_token_are_counted(store: Store) -> None:
    store.open_session(b"0", 0)
    store.apply(b"0", begin(1, "x", 1))
    for number in range(1, 4):
        store = store.reopen(f"/run/{number}")
        session = b"%d" % number
        store.open_session(session, 0)
        assert store.claim(session) == [("x", number)]
        store.apply(session, AdoptRequest(1, "x", "a", ints(number)))
    store.apply(b"3", LogTokens(2, ints(3), ints(10)))
    store = store.reopen("/run/4")
    store.open_session(b"4", 0)
    assert store.claim(b"4") == [("x", 1)]


def test_a_request_is_one_row_when_it_has_ended_and_none_when_it_was_aborted(store: Store) -> None:
    store.open_session(b"s", 0)
    end = StreamEnd(1, FinishReason.STOP, "stop", num_cached_tokens=3)
    store.apply(b"s", begin(1, "x", 1, key="k"), begin(2, "y", 2))
    assert store.requests.reserve_key(b"s", ReserveKey(1, "a", "k")).request_id == "x"
    assert store.requests.reserve_key(b"s", ReserveKey(1, "b", "k")).request_id == ""
    store.apply(b"s", LogTokens(3, ints(1, 2), ints(10, 11, 20), ints(2, 1)), EndStream(4, 1, end))
    store.apply(b"s", EndStream(5, 2, StreamEnd(1, FinishReason.ABORT)))
    store = store.reopen()
    assert len(store.requests.live) == 0
    assert store.requests.find_finished("a", "x") == [StreamState(ints(10), end)]
    assert store.requests.find_finished("b", "x") is None
    assert store.requests.find_record("a", "x") == b"record of x"
    assert store.requests.find_finished("a", "y") is None
    assert store.requests.find_record("a", "y") == b""
    assert store.requests.reserve_key(b"s", ReserveKey(2, "a", "k")).request_id == "x"


def test_idempotency_key_is_reserved_for_one_caller_at_a_time(store: Store) -> None:
    store.open_session(b"s", 0)
    first, second = ReserveKey(1, "a", "k"), ReserveKey(2, "a", "k")
    assert not store.requests.reserve_key(b"s", first).is_busy
    assert not store.requests.reserve_key(b"s", first).is_busy
    assert store.requests.reserve_key(b"s", second).is_busy
    store.requests.keys.release("a", "k")
    assert not store.requests.reserve_key(b"s", second).is_busy


def test_a_full_disk_loses_no_token_of_a_request_that_was_accepted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "RETRY_S", 0.0)
    store.open_session(b"s", 0)
    store.apply(b"s", begin(1, "x", 1), begin(2, "y", 2))
    connection = store.database.connection
    [num_pages] = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {num_pages + 2}")
    large = BeginRequest(4, "not kept", "a", ints(3), bytes(10**5))
    for entry in (LogTokens(3, ints(1, 2), ints(10, 20)), large):
        store.requests.apply(b"s", entry)
    store.requests.apply(b"s", EndStream(5, 2, StreamEnd(1, FinishReason.STOP)))
    assert not store.commit() and "full" in store.database.trouble
    store.requests.apply(b"s", LogTokens(6, ints(1, 3), ints(11, 30)))
    assert store.tokens("x") == [[10, 11]]
    connection.execute("PRAGMA max_page_count = 100000")
    assert store.commit() and not store.database.trouble
    store.apply(b"s", LogTokens(7, ints(1), ints(12)))
    store = store.reopen()
    assert store.tokens("x") == [[10, 11, 12]]
    assert set(store.requests.live.by_name) == {("a", "x")}
    assert store.requests.find_record("a", "not kept") == b""


@pytest.mark.parametrize("seed", range(12))
def test_the_state_is_the_same_wherever_the_store_stops(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(requests, "CHECKPOINT_BYTES", rng.choice((300, 3000, 10**6)))
    store = Store(tmp_path / "store.db")
    session, num_sessions, number, last_stream = b"", 0, 0, 0
    streams: dict[int, tuple[str, int]] = {}
    expected: dict[str, list[list[int]]] = {}
    running: set[str] = set()

    def new_session() -> None:
        nonlocal session, num_sessions, number
        num_sessions += 1
        session, number = b"%d" % num_sessions, 0
        store.open_session(session, 0)

    def new_streams(count: int) -> list[int]:
        nonlocal last_stream
        last_stream += count
        return list(range(last_stream - count + 1, last_stream + 1))

    def next_number() -> int:
        nonlocal number
        number += 1
        return number

    new_session()
    for step in range(150):
        kind = rng.random()
        if kind < 0.15:
            name, numbers = f"r{step}", new_streams(rng.randint(1, 3))
            store.requests.apply(session, begin(next_number(), name, *numbers))
            expected[name] = [[] for _ in numbers]
            running.add(name)
            streams |= {n: (name, position) for position, n in enumerate(numbers)}
        elif kind < 0.65 and streams:
            chosen = rng.sample(sorted(streams), rng.randint(1, len(streams)))
            counts = [rng.randint(1, 3) for _ in chosen]
            values = [rng.randrange(1000) for _ in range(sum(counts))]
            entry = LogTokens(next_number(), ints(*chosen), ints(*values), ints(*counts))
            store.requests.apply(session, entry)
            for n, count in zip(chosen, counts, strict=True):
                name, position = streams[n]
                expected[name][position] += values[:count]
                del values[:count]
        elif kind < 0.72 and streams:
            old = rng.choice(sorted(streams))
            [new] = new_streams(1)
            name, position = streams[new] = streams.pop(old)
            kept = rng.randint(0, len(expected[name][position]))
            store.requests.apply(session, MoveStream(next_number(), old, new, kept))
            del expected[name][position][kept:]
        elif kind < 0.8 and streams:
            n = rng.choice(sorted(streams))
            name, position = streams.pop(n)
            end = StreamEnd(len(expected[name][position]), FinishReason.STOP)
            store.requests.apply(session, EndStream(next_number(), n, end))
            if not any(name == other for other, _ in streams.values()):
                running.discard(name)
        elif kind < 0.88:
            assert store.commit()
            store = store.reopen()
            assert store.open_session(session, 0) == number
        elif kind < 0.94:
            assert store.commit()
            new_session()
            claimed = {request_id for request_id, _ in store.claim(session)}
            assert claimed == running
            streams.clear()
            for name in sorted(claimed):
                states = store.requests.live.by_name["a", name].states
                numbers = new_streams(len(states))
                entry = AdoptRequest(next_number(), name, "a", ints(*numbers))
                store.requests.apply(session, entry)
                for position, (n, state) in enumerate(zip(numbers, states, strict=True)):
                    if state.end is None:
                        streams[n] = name, position
        else:
            assert store.commit()
        if step % 10 == 0:
            assert store.commit()
            assert {name: store.tokens(name) for name in expected} == expected
    assert store.commit()
    store = store.reopen("/run/another")
    assert {name: store.tokens(name) for name in expected} == expected
    assert {name for _, name in store.requests.live.by_name} == running


def test_requests_of_a_running_engine_cannot_be_claimed(store: Store, tmp_path: Path) -> None:
    run = tmp_path / "other engine"
    run.mkdir()
    lock = os.open(run, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    store.open_session(b"other", run=str(run))
    store.open_session(b"own")
    store.apply(b"other", begin(1, "x", 1), begin(2, "y", 2), LogTokens(3, ints(1), ints(10)))
    duty = TakeDuty(1, "batches")
    assert store.requests.take_duty(b"other", duty).has_it and store.commit()
    store = store.reopen()
    assert store.open_session(b"own") == 0 and store.claim(b"own") == []
    assert not store.requests.take_duty(b"own", duty).has_it
    # One of its frontends crashes, and another process replaces it.
    store.open_session(b"next", run=str(run))
    assert store.claim(b"own") == [] and store.claim(b"next") == [("x", 1), ("y", 1)]
    assert not store.requests.end_dead_engines()
    os.close(lock)
    assert store.requests.end_dead_engines()
    assert store.claim(b"own") == [("x", 2), ("y", 2)]
    assert store.requests.take_duty(b"own", duty).has_it
    store.apply(b"next", AdoptRequest(1, "x", "a", ints(1)), LogTokens(2, ints(1), ints(66)))
    assert store.tokens("x") == [[10]]


def test_logprobs_are_those_of_the_tokens(store: Store) -> None:
    def rows(stream: int, *tokens: int) -> TokenLogprobs:
        values = array("f", (token / 8 for token in tokens)).tobytes()
        return TokenLogprobs(stream, len(tokens), ints(*tokens), values, ints(*tokens))

    def recorded() -> list[list[int]]:
        [state] = store.requests.live.by_name["a", "x"].states
        token_ids = b"".join(message.token_ids for message in state.logprobs)
        ranks = b"".join(message.ranks for message in state.logprobs)
        return [array("i", each).tolist() for each in (state.tokens, token_ids, ranks)]

    store.open_session(b"s")
    first = LogTokens(2, ints(1), ints(10, 11, 12), ints(3), logprobs=[rows(1, 10, 11, 12)])
    store.apply(
        b"s", begin(1, "x", 1), msgspec.structs.replace(first, prompt_logprobs=[rows(1, 5)])
    )
    store.apply(
        b"s", LogTokens(3, ints(1), ints(13), logprobs=[rows(1, 13)]), MoveStream(4, 1, 2, 2)
    )
    store = store.reopen()
    assert recorded() == [[10, 11]] * 3
    store.apply(b"s", LogTokens(5, ints(2), ints(12), logprobs=[rows(2, 12)]))
    assert recorded() == [[10, 11, 12]] * 3
    request = store.requests.live.by_name["a", "x"]
    request.readers[b"f", 1] = [1]
    update = request.take_update((b"f", 1))
    assert update is not None
    [stream] = update.streams
    assert [m.token_ids for m in stream.logprobs] == [ints(11), ints(12)]
    assert stream.tokens == ints(11, 12) and stream.prompt_logprobs == []
    store.apply(b"s", MoveStream(6, 2, 3, 0))
    assert recorded() == [[]] * 3
    assert request.states[0].prompt_logprobs == []


def test_readers_get_the_last_tokens_of_a_stream_with_its_end(store: Store) -> None:
    store.open_session(b"s")
    store.apply(b"s", begin(1, "x", 1), LogTokens(2, ints(1), ints(10)))
    request, reader = store.requests.live.by_name["a", "x"], (b"f", 1)
    request.readers[reader] = [0]
    update = request.take_update(reader)
    assert update is not None and update.streams[0].tokens == ints(10)
    done = FinishedRequest(1, FinishReason.STOP)
    store.apply(b"s", LogTokens(3, ints(1), ints(11, 2), ints(2), finished=[done]))
    assert request.take_update(reader) is None
    store.apply(b"s", EndStream(4, 1, StreamEnd(3, int(FinishReason.STOP))))
    update = request.take_update(reader)
    assert update is not None and update.streams[0].end is not None
    assert (update.streams[0].start, update.streams[0].tokens) == (1, ints(11, 2))
