"""A connection whose frontend has exited stays open, and its successor knows which bytes are still to be sent."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine.frontend.api.durable.sent_bytes import (
    MAX_UNSENT,
    TAIL_BYTES,
    SentMemory,
    SentRecord,
    count_accepted,
    read_sent,
)
from engine.frontend.store import held_connections
from engine.frontend.store.held_connections import (
    Drop,
    HeldConnections,
    Hello,
    Keep,
    Nothing,
    Take,
    decode,
    encode,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from support.servers.engine_fixtures import on_event_loop


def frame(number: int, size: int, *, has_id: bool) -> bytes:
    """Return an event of a stream whose text has `size` characters."""
    event = b'data: {"text":"%b"}\n\n' % (b"x" * size)
    return b"%x\r\n%b%b\r\n" % (len(event), b"id: a:%d\n" % number if has_id else b"", event)


@given(
    sizes=st.lists(st.integers(0, 400) | st.just(TAIL_BYTES), min_size=1, max_size=60),
    is_read=st.booleans(),
    has_ids=st.booleans(),
    num_before=st.sampled_from([0, 5]),
)
@settings(max_examples=40, deadline=None)
def test_the_record_of_a_response_names_the_bytes_that_the_system_has_not_accepted(
    sizes: list[int], is_read: bool, has_ids: bool, num_before: int
) -> None:
    on_event_loop(check_record)(sizes, is_read=is_read, has_ids=has_ids, num_before=num_before)


async def check_record(sizes: list[int], *, is_read: bool, has_ids: bool, num_before: int) -> None:
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.socket()
    if not is_read:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    client.connect(listener.getsockname())
    accepted, _ = listener.accept()
    accepted.setblocking(False)
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, accepted)
    copy = socket.socket(fileno=os.dup(accepted.fileno()))
    memory = SentMemory()
    slot = memory.take_slot()
    assert slot is not None
    try:
        first = count_accepted(copy)
        record = SentRecord(memory, slot, 5, transport)
        before = read_sent(memory.fd, slot, 5, copy)
        assert before is not None and not before.has_begun
        record.note_start(b"a:0")
        transport.write(b"HTTP/1.1 200 OK\r\n" * num_before)
        written = b"HTTP/1.1 200 OK\r\n" * num_before
        for number, size in enumerate(sizes, 1):
            data = frame(number, size, has_id=has_ids)
            if not has_ids:
                record.note(b"a:%d" % number)
            record.add(data)
            transport.write(data)
            written += data
        found = read_sent(memory.fd, slot, 5, copy)
        unsent = written[count_accepted(copy) - first :]
        if found is None:
            assert len(unsent) > MAX_UNSENT
            return
        assert (found.unsent, found.last_event_id) == (unsent, f"a:{len(sizes)}")
        assert found.has_begun and not found.has_ended
        record.add_end(b"the end" if has_ids else b"")
        ended = read_sent(memory.fd, slot, 5, copy)
        unsent += b"7\r\nthe end\r\n0\r\n\r\n" if has_ids else b"0\r\n\r\n"
        assert ended is None or (ended.has_ended and ended.unsent == unsent)
    finally:
        transport.abort()
        for each in (listener, client, copy):
            each.close()
        memory.close()


@on_event_loop
async def test_bytes_that_a_successor_has_still_to_send_survive_its_crash() -> None:
    loop = asyncio.get_running_loop()
    memory = SentMemory()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    accepted.setblocking(False)
    transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, accepted)
    record = SentRecord(memory, 0, 6, transport, "a:3", b"rest")
    assert read_sent(memory.fd, 0, 6, accepted) == (True, False, b"rest", "a:3")
    assert read_sent(memory.fd, 0, 5, accepted) is None, "it is the record of another response"
    transport.write(b"rest")
    record.add_end(b"")
    assert read_sent(memory.fd, 0, 6, accepted) == (True, True, b"0\r\n\r\n", "a:3")
    # The head may be all that was sent for a while.
    record = SentRecord(memory, 1, 7, transport)
    record.note_start(b"b:0")
    transport.write(b"HTTP/1.1 200 OK\r\n\r\n")
    assert read_sent(memory.fd, 1, 7, accepted) is None
    record.add(b"")
    assert read_sent(memory.fd, 1, 7, accepted) == (True, False, b"", "b:0")
    transport.abort()
    client.close()
    memory.close()


@on_event_loop
async def test_a_response_to_a_client_that_has_disconnected_is_not_recorded() -> None:
    loop = asyncio.get_running_loop()
    memory = SentMemory()
    slot = memory.take_slot()
    assert slot is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    copy = socket.socket(fileno=os.dup(accepted.fileno()))
    accepted.setblocking(False)
    transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, accepted)
    record = SentRecord(memory, slot, 5, transport)
    transport.abort()
    # The socket is closed in the next turn of the event loop.
    await asyncio.sleep(0)
    record.add_end(b"the end")
    found = read_sent(memory.fd, slot, 5, copy)
    assert found is not None and not (found.has_begun or found.has_ended or found.unsent)
    client.close()
    copy.close()
    memory.close()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[HeldConnections]:
    held = HeldConnections(str(tmp_path / "connections"))
    yield held
    held.close()


def connect(tmp_path: Path) -> socket.socket:
    frontend = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    frontend.connect(str(tmp_path / "connections"))
    return frontend


def turn(held: HeldConnections) -> None:
    for _ in range(3):
        held.turn()


def take(held: HeldConnections, taking: socket.socket, pid: int, number: int) -> object:
    """Ask for a copy, write on the connection if there is one, and return the reply."""
    taking.send(encode(Take(pid, number)))
    turn(held)
    data, fds, _, _ = socket.recv_fds(taking, 100, 2)
    if fds:
        os.write(fds[0], b"%d" % number)
    for fd in fds:
        os.close(fd)
    return decode(data)


def test_only_the_successor_of_a_frontend_takes_its_connections(
    holder: HeldConnections, tmp_path: Path
) -> None:
    memory = SentMemory()
    frontend, taking = connect(tmp_path), connect(tmp_path)
    kept, client = socket.socketpair()
    dropped, dropped_client = socket.socketpair()
    socket.send_fds(frontend, [encode(Hello(3, 1))], [memory.fd])
    message = Keep(1, "a", b"GET /", 7)
    socket.send_fds(frontend, [encode(message)], [kept.fileno()])
    socket.send_fds(frontend, [encode(Keep(2, "b", b"GET /", 8))], [dropped.fileno()])
    frontend.send(encode(Drop(2)))
    kept.close()
    dropped.close()
    turn(holder)
    assert dropped_client.recv(1) == b"", "the copy of an answered connection is still open"
    assert take(holder, taking, 1, 5) == Nothing(), "the frontend still runs"
    frontend.close()
    # A second successor takes it if the first one crashes before it has sent its own copy.
    for number in (5, 6):
        successor = connect(tmp_path)
        socket.send_fds(successor, [encode(Hello(3, number))], [memory.fd])
        turn(holder)
        assert take(holder, taking, 2, number) == Nothing()
        assert take(holder, taking, number, number) == message
        assert take(holder, taking, number, number + 100) == Nothing()
        assert client.recv(10) == b"%d" % number
        if number == 5:
            successor.close()
            turn(holder)
    # Its own copy takes the place of the other one.
    again, _ = socket.socketpair()
    socket.send_fds(successor, [encode(Keep(7, "a", b"GET /", 9, 1, replaces=6))], [again.fileno()])
    successor.send(encode(Drop(6)))
    turn(holder)
    client.setblocking(False)
    assert not is_closed(client)
    successor.send(encode(Drop(7)))
    turn(holder)
    assert is_closed(client), "the holder still has a copy"
    memory.close()


def test_a_frontend_that_connects_again_replaces_its_copies(
    holder: HeldConnections, tmp_path: Path
) -> None:
    memory = SentMemory()
    kept, client = socket.socketpair()
    for number in (1, 2):
        frontend = connect(tmp_path)
        socket.send_fds(frontend, [encode(Hello(0, 77))], [memory.fd])
        socket.send_fds(frontend, [encode(Keep(number, "a", b"GET /", 7))], [kept.fileno()])
        turn(holder)
        if number == 1:
            # Neither these messages nor the end of the connection are read before the next greeting.
            for other in range(100):
                frontend.send(encode(Drop(other + 10)))
            frontend.close()
    kept.close()
    frontend.send(encode(Drop(2)))
    turn(holder)
    assert client.recv(1) == b"", "the first copy is still open"
    memory.close()


def test_copies_that_nobody_takes_are_closed(
    holder: HeldConnections, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_connections, "LEFT_S", 0.0)
    memory = SentMemory()
    frontend = connect(tmp_path)
    kept, client = socket.socketpair()
    socket.send_fds(frontend, [encode(Hello(0, 1))], [memory.fd])
    socket.send_fds(frontend, [encode(Keep(1, "a", b"GET /", 7))], [kept.fileno()])
    kept.close()
    turn(holder)
    frontend.close()
    turn(holder)
    assert client.recv(1) == b""
    memory.close()


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_copies_leave_descriptors_for_the_files_of_the_store(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory = SentMemory()
    num_before = num_open()
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * num_before + 200, limits[1]))
    clients: list[socket.socket] = []
    try:
        held = HeldConnections(str(tmp_path / "connections"))
        frontend, taking = connect(tmp_path), connect(tmp_path)
        socket.send_fds(frontend, [encode(Hello(0, 1))], [memory.fd])
        while not (clients and is_closed(clients[-1])):
            kept, client = socket.socketpair()
            client.setblocking(False)
            clients.append(client)
            message = Keep(len(clients), "a", b"GET /", 7)
            socket.send_fds(frontend, [encode(message)], [kept.fileno()])
            kept.close()
            turn(held)
        # The next frontend can still connect, and take all copies. Each of them is closed once.
        frontend.close()
        successor = connect(tmp_path)
        socket.send_fds(successor, [encode(Hello(0, 2))], [memory.fd])
        turn(held)
        for number in range(1, len(clients)):
            assert isinstance(take(held, taking, 2, number), Keep)
        assert take(held, taking, 2, len(clients)) == Nothing()
        for number in range(1, len(clients)):
            successor.send(encode(Drop(number)))
            turn(held)
        for client in clients:
            client.close()
        for each in (successor, taking, held):
            each.close()
        assert num_open() <= num_before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        memory.close()


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False


def test_a_frontend_that_sends_nonsense_is_disconnected(
    holder: HeldConnections, tmp_path: Path
) -> None:
    frontend = connect(tmp_path)
    frontend.send(b"\xff\xff")
    turn(holder)
    assert frontend.recv(10) == b""
    # Others are served.
    assert take(holder, connect(tmp_path), 0, 1) == Nothing()
