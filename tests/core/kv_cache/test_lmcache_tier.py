"""The scheduler side of the connector to LMCache. Every token is compared with that of the request run alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from engine.core.kv_cache.connectors.lmcache_tier import LMCacheTier
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.kv_cache_groups import AttentionKind, KVCacheGroup
from engine.protocol.kv_transfer.store import BlockLookup, BlocksStored, StoreCommands, StoreReport
from engine.protocol.worker_messages import KVConnectorOutput
from support.scheduler.recorded_harness import RecordedHarness, replay

WINDOWED = (KVCacheGroup(), KVCacheGroup(AttentionKind.SLIDING_WINDOW, 8))


class Worker:
    """The half of a worker, with a store that several replicas can share. It answers when the test says.

    Attributes:
        lost: The keys of blocks that the store reports as stored, and cannot load.
    """

    def __init__(self, harness: RecordedHarness, stored: dict[bytes, list[Any]]) -> None:
        self._kv_cache = harness.worker.kv_cache
        self._harness = harness
        self.stored = stored
        self.lost: set[bytes] = set()
        self.lookups: list[BlockLookup] = []
        self.reports: list[KVConnectorOutput] = []
        harness.worker.transfers = self
        self._report(StoreReport(capacity=64))

    def receive(self, metadata: bytes) -> None:
        """Do nothing: commands are applied when their step begins."""

    def begin_step(self, metadata: bytes) -> None:
        if not metadata:
            return
        commands = msgspec.msgpack.decode(metadata, type=StoreCommands)
        for key in commands.removed:
            self.stored.pop(key, None)
        blocks = int32_view(commands.store_blocks).tolist()
        for key, block in zip(commands.stores, blocks, strict=True):
            self.stored[key] = list(self._kv_cache[block])
        self._report(StoreReport(deleted=commands.removed, ended=commands.stores))
        for load in commands.loads:
            invalid = []
            for key, block in zip(load.keys, int32_view(load.block_ids).tolist(), strict=True):
                if key in self.lost:
                    invalid.append(block)
                else:
                    self._kv_cache[block][:] = self.stored[key]
            self.reports.append(
                KVConnectorOutput(
                    finished_recving=[load.transfer_id], invalid_block_ids=int32_bytes(invalid)
                )
            )
        self.lookups += commands.lookups

    def end_step(self) -> None:
        return None

    def answer(self) -> None:
        for lookup in self.lookups:
            mask = bytes(key in self.stored for key in lookup.keys)
            self._report(StoreReport(answers=[BlocksStored(lookup.transfer_id, mask)]))
        self.lookups.clear()

    def turn_off(self) -> None:
        self._report(StoreReport(is_off=True))

    def _report(self, report: StoreReport) -> None:
        self.reports.append(KVConnectorOutput(data=msgspec.msgpack.encode(report)))

    def run(self) -> None:
        """Process steps until nothing happens."""
        while self.reports or self._harness.step():
            reports, self.reports = self.reports, []
            for report in reports:
                self._harness.scheduler.update_from_connector(0, report, self._harness.now)


def start(stored: dict[bytes, list[Any]], **settings: Any) -> tuple[RecordedHarness, Worker]:
    harness = RecordedHarness(connector=LMCacheTier(), **settings)
    return harness, Worker(harness, stored)


@pytest.mark.parametrize("groups", [(KVCacheGroup(),), WINDOWED])
def test_a_request_waits_until_its_blocks_are_looked_up_and_loads_them(
    groups: tuple[KVCacheGroup, ...],
) -> None:
    """Blocks that are lost are computed, and requests that wait when LMCache fails are computed."""
    stored: dict[bytes, list[Any]] = {}
    first, worker = start(stored, groups=groups)
    first.add(41, 2)
    worker.run()
    assert not first.received[next(iter(first.received))].is_over
    worker.answer()
    worker.run()
    assert len(stored) >= 10
    first.check_empty()
    assert all(replay(first.dump()))

    second, worker = start(stored, groups=groups)
    found = second.add(41, 2)
    worker.run()
    worker.answer()
    worker.run()
    assert second.received[found].is_over
    assert second.worker.num_prompt_tokens_computed == 1
    second.check_empty()
    assert all(replay(second.dump()))

    third, worker = start(stored, groups=groups)
    worker.lost |= stored.keys()
    lost = third.add(41, 2)
    worker.run()
    worker.answer()
    worker.run()
    waiting = third.add(60, 2)
    worker.run()
    assert third.received[lost].is_over
    assert not third.received[waiting].is_over
    worker.turn_off()
    worker.run()
    assert third.received[waiting].is_over
    assert third.worker.num_prompt_tokens_computed >= 41
    third.check_empty()
    assert all(replay(third.dump()))
