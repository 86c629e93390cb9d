"""The worker's half of a store, when reads of it hang."""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import msgspec
import psutil
import pytest
import torch
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.kv_transfer.store import BlockLoad, StoreCommands, StoreReport
from engine.protocol.worker_messages import KVConnectorOutput
from engine.workers.kv_transfer.block_memory import BlockMemory
from engine.workers.kv_transfer.store_connector import StoreConnector
from support.processes.program import wait_until

KEYS = [b"%032d" % number for number in range(12)]


class SlowStore:
    """Has every block, full of sevens. Reads of the key `slow` end once `may_end` is set."""

    def __init__(self, slow: bytes) -> None:
        self.slow = slow
        self.may_end = threading.Event()

    def look_up(self, keys: Sequence[bytes]) -> bytes:
        return bytes([1] * len(keys))

    def append(self, key: bytes, data: memoryview) -> bool:
        return True

    def read(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        if key == self.slow:
            assert self.may_end.wait(60)
        for part in parts:
            part[:] = b"\7" * len(part)
        return True

    def remove(self, keys: Sequence[bytes]) -> None:
        pass

    def clear(self) -> None:
        pass

    def close(self) -> None:
        pass


class PipedStore(SlowStore):
    """Reads of it begin with a message to a pipe, and end with one from it."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(b"")
        self.pipe = pipe

    def read(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        self.pipe.send(key)
        self.pipe.recv()
        return super().read(key, parts)


class Connector(StoreConnector):
    def __init__(self, pages: torch.Tensor, store: SlowStore, hang_s: float) -> None:
        super().__init__("the store", BlockMemory([pages]), store)
        self.outputs: list[KVConnectorOutput] = []
        self._start(hang_s)

    def _report_state(self) -> None:
        self._report(StoreReport(capacity=1))

    def receive(self) -> list[KVConnectorOutput]:
        """Return all reports so far."""
        self.outputs += self.take_reports()
        return self.outputs

    def hangs(self) -> list[bool]:
        """Return what reports say about hanging."""
        data = [each.data for each in self.receive() if each.data]
        reports = [msgspec.msgpack.decode(each, type=StoreReport) for each in data]
        return [each.hangs for each in reports if each.hangs is not None]

    def load(self, transfer_id: int, numbers: list[int]) -> list[int]:
        """Return the blocks of a load that are invalid at its end."""
        keys = [KEYS[number] for number in numbers]
        commands = StoreCommands(loads=[BlockLoad(transfer_id, keys, int32_bytes(numbers))])
        self.begin_step(msgspec.msgpack.encode(commands))
        self.start_loads()

        def ends() -> list[KVConnectorOutput]:
            return [each for each in self.receive() if transfer_id in each.finished_recving]

        wait_until(ends, what="the load ended")
        (end,) = ends()
        return sorted(int32_view(end.invalid_block_ids).tolist())


def test_loads_fail_while_a_read_hangs(caplog: pytest.LogCaptureFixture) -> None:
    """The blocks that could not be read belong to others when the read ends, and stay as these have filled them."""
    pages = torch.zeros(16, 64, dtype=torch.uint8)
    store = SlowStore(KEYS[1])
    connector = Connector(pages, store, hang_s=0.5)
    with caplog.at_level(logging.INFO):
        assert connector.load(1, [0, 1, 2]) == [1]
        assert connector.hangs() == [True]
        # One reader hangs, but nothing is read until it has ended.
        assert connector.load(2, [3, 4]) == [3, 4]
        pages[1] = 9
        store.may_end.set()
        wait_until(lambda: False in connector.hangs())
        assert connector.load(3, [5, 6]) == []
    assert connector.hangs() == [True, False]
    assert [int(value) for value in pages[:7, 0]] == [7, 9, 7, 0, 0, 7, 7]
    assert [record.message for record in caplog.records] == [
        "the store has not answered a read for 0.5 s; prompts are computed until it answers",
        "the store answers again",
    ]
    connector.close()


def _load_a_block(pipe: Connection) -> None:
    connector = Connector(torch.zeros(16, 64, dtype=torch.uint8), PipedStore(pipe), hang_s=2)
    invalid = connector.load(1, [0])
    pipe.send((invalid, connector.hangs()))


def test_a_read_does_not_hang_because_its_process_was_stopped() -> None:
    spawn = multiprocessing.get_context("spawn")
    pipe, other = spawn.Pipe()
    process = spawn.Process(target=_load_a_block, args=(other,), daemon=True)
    process.start()
    try:
        assert pipe.poll(60) and pipe.recv() == KEYS[0]
        psutil.Process(process.pid).suspend()
        resumption = time.monotonic() + 3
        wait_until(lambda: time.monotonic() > resumption, what="three seconds are over")
        pipe.send(None)
        psutil.Process(process.pid).resume()
        assert pipe.poll(60) and pipe.recv() == ([], [])
    finally:
        process.kill()
        process.join()
