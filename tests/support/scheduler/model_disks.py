"""The worker side of the KV cache on disk for a model worker, with any number of disks and every kind of failure."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import msgspec
from engine.core.kv_cache.connector import BlockConnector
from engine.core.kv_cache.connectors.disk_tier import DiskTier
from engine.core.kv_cache.connectors.multi_connector import MultiConnector
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.kv_transfer.multi import MultiCommands, MultiReport
from engine.protocol.kv_transfer.store import StoreCommands, StoreReport
from engine.protocol.worker_messages import KVConnectorOutput
from support.scheduler.fingerprints import BAD
from support.scheduler.harness import Harness
from support.scheduler.model_connector import UNDER_WAY


class _Load(msgspec.Struct):
    transfer_id: int
    left: list[tuple[bytes, int]]
    invalid: list[int] = []


class _Disk:
    """A disk that works when the test says, loses blocks, and fails to store or to load some."""

    def __init__(self, kv_cache: list[list[Any]], rng: random.Random) -> None:
        self._kv_cache, self._rng = kv_cache, rng
        self._capacity = rng.choice((2, 8, 100))
        self._loss = rng.choice((0.0, 0.0, 0.1, 0.5))
        self._blocks: dict[bytes, list[Any]] = {}
        self._jobs: deque[StoreCommands] = deque()
        self._copies: deque[list[list[Any]]] = deque()
        self._new_loads: list[_Load] = []
        self._loads: list[_Load] = []
        self._reported: set[bytes] = set()
        self.reports: list[KVConnectorOutput] = []
        self.num_loaded = 0
        self.reset()

    @property
    def is_idle(self) -> bool:
        return not (self._jobs or self._loads or self.reports)

    def reset(self) -> None:
        self._loads.clear()
        self.reports.clear()
        self._reported.clear()
        self._report(StoreReport(capacity=self._capacity))

    def begin_step(self, metadata: bytes) -> None:
        if not metadata:
            return
        commands = msgspec.msgpack.decode(metadata, type=StoreCommands)
        self._jobs.append(commands)
        blocks = int32_view(commands.store_blocks).tolist()
        self._copies.append([list(self._kv_cache[block]) for block in blocks])
        for load in commands.loads:
            blocks = int32_view(load.block_ids).tolist()
            pairs = list(zip(load.keys, blocks, strict=True))
            self._new_loads.append(_Load(load.transfer_id, pairs))

    def start_loads(self) -> None:
        for load in self._new_loads:
            for _, block in load.left:
                self._kv_cache[block][:] = [UNDER_WAY] * len(self._kv_cache[block])
        self._loads += self._new_loads
        self._new_loads.clear()

    def work(self) -> None:
        rng = self._rng
        if self._jobs and rng.random() < 0.6:
            self._apply(self._jobs.popleft(), self._copies.popleft())
        if self._blocks and rng.random() < 0.02:
            del self._blocks[rng.choice(list(self._blocks))]
        for load in list(self._loads):
            while load.left and rng.random() < 0.5:
                self._load(load, *load.left.pop(rng.randrange(len(load.left))))
            if not load.left and rng.random() < 0.5:
                self._loads.remove(load)
                self._report(StoreReport(), load)

    def _apply(self, commands: StoreCommands, copies: list[list[Any]]) -> None:
        if commands.clears:
            self._blocks.clear()
        for key in commands.removed:
            self._blocks.pop(key, None)
        if commands.removed:
            self._report(StoreReport(deleted=commands.removed))
        for key, copy in zip(commands.stores, copies, strict=True):
            if self._rng.random() < 0.9:
                self._blocks.setdefault(key, copy)
        if commands.stores:
            self._report(StoreReport(ended=commands.stores))

    def _load(self, load: _Load, key: bytes, block: int) -> None:
        found = self._kv_cache[block]
        assert found == [UNDER_WAY] * len(found), "a block was written to during its load"
        if key in self._blocks and self._rng.random() >= self._loss:
            found[:] = self._blocks[key]
            self.num_loaded += 1
        else:
            found[:] = [BAD] * len(found)
            load.invalid.append(block)

    def _report(self, report: StoreReport, load: _Load | None = None) -> None:
        report.stored = sorted(self._blocks.keys() - self._reported)
        report.removed = sorted(self._reported - self._blocks.keys())
        self._reported = set(self._blocks)
        output = KVConnectorOutput(data=msgspec.msgpack.encode(report))
        if load is not None:
            output.finished_recving = [load.transfer_id]
            output.invalid_block_ids = int32_bytes(load.invalid)
        self.reports.append(output)


class ModelDisks:
    """The disks of one worker. Several of them are combined."""

    def __init__(self, harness: Harness, num_disks: int, rng: random.Random) -> None:
        self._harness, self._rng = harness, rng
        self._disks = [_Disk(harness.worker.kv_cache, rng) for _ in range(num_disks)]
        self._num_left: dict[int, int] = {}
        harness.worker.transfers = self

    @staticmethod
    def make_connector(num_disks: int) -> BlockConnector:
        """Return the scheduler side."""
        tiers = [DiskTier() for _ in range(num_disks)]
        return MultiConnector(tiers) if num_disks > 1 else tiers[0]

    @property
    def is_idle(self) -> bool:
        return all(disk.is_idle for disk in self._disks)

    @property
    def num_loaded(self) -> int:
        return sum(disk.num_loaded for disk in self._disks)

    def receive(self, metadata: bytes) -> None:
        """Do nothing: commands are applied when their step begins."""

    def begin_step(self, metadata: bytes) -> None:
        parts = [metadata]
        if metadata and len(self._disks) > 1:
            commands = msgspec.msgpack.decode(metadata, type=MultiCommands)
            self._num_left |= dict(commands.loads)
            parts = commands.metadata
        if metadata:
            for disk, part in zip(self._disks, parts, strict=True):
                disk.begin_step(part)
            for disk in self._disks:
                disk.start_loads()

    def end_step(self) -> None:
        return None

    def work(self) -> None:
        """Let the disks do some of their work, and deliver some of their reports."""
        for number, disk in enumerate(self._disks):
            disk.work()
            if self._rng.random() < 0.7:
                reports, disk.reports = disk.reports, []
                for report in reports:
                    self._deliver(number, report)

    def _deliver(self, number: int, report: KVConnectorOutput) -> None:
        if len(self._disks) > 1:
            report.data = msgspec.msgpack.encode(MultiReport(number, report.data))
            for transfer_id in report.finished_recving:
                self._num_left[transfer_id] -= 1
            report.finished_recving = [
                transfer_id
                for transfer_id in report.finished_recving
                if not self._num_left[transfer_id]
            ]
        self._harness.scheduler.update_from_connector(0, report, self._harness.now)

    def lose_core(self) -> None:
        """Replace the core of the harness, which started the loads."""
        self._harness.connector = self.make_connector(len(self._disks))
        self._harness.lose_core()
        self._num_left.clear()
        for disk in self._disks:
            disk.reset()
