"""The worker's half of a store, when reads of it hang."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import msgspec
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


class Connector(StoreConnector):
    def __init__(self, memory: BlockMemory, store: SlowStore) -> None:
        super().__init__("the store", memory, store)
        self._start(hang_s=0.5)

    def _report_state(self) -> None:
        self._report(StoreReport(capacity=1))


def test_loads_fail_while_a_read_hangs(caplog: pytest.LogCaptureFixture) -> None:
    """The blocks that could not be read belong to others when the read ends, and stay as these have filled them."""
    pages = [torch.zeros(16, 64, dtype=torch.uint8)]
    store = SlowStore(KEYS[1])
    connector = Connector(BlockMemory(pages), store)
    outputs: list[KVConnectorOutput] = []

    def hangs() -> list[bool]:
        reports = [msgspec.msgpack.decode(o.data, type=StoreReport) for o in outputs if o.data]
        return [each.hangs for each in reports if each.hangs is not None]

    def load(transfer_id: int, numbers: list[int]) -> list[int]:
        """Return the blocks of a load that are invalid at its end."""
        keys = [KEYS[number] for number in numbers]
        commands = StoreCommands(loads=[BlockLoad(transfer_id, keys, int32_bytes(numbers))])
        connector.begin_step(msgspec.msgpack.encode(commands))
        connector.start_loads()

        def ends() -> list[KVConnectorOutput]:
            outputs.extend(connector.take_reports())
            return [each for each in outputs if transfer_id in each.finished_recving]

        wait_until(lambda: bool(ends()), what="the load ended")
        (end,) = ends()
        return sorted(int32_view(end.invalid_block_ids).tolist())

    with caplog.at_level(logging.INFO):
        assert load(1, [0, 1, 2]) == [1]
        assert hangs() == [True]
        # One reader hangs, but nothing is read until it has ended.
        assert load(2, [3, 4]) == [3, 4]
        pages[0][1] = 9
        store.may_end.set()
        wait_until(lambda: outputs.extend(connector.take_reports()) or False in hangs())
        assert load(3, [5, 6]) == []
    assert hangs() == [True, False]
    assert [int(value) for value in pages[0][:7, 0]] == [7, 9, 7, 0, 0, 7, 7]
    assert [record.message for record in caplog.records] == [
        "the store has not answered a read for 0.5 s; prompts are computed until it answers",
        "the store answers again",
    ]
    connector.close()
