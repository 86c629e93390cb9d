"""The worker side of KV connectors to a store, which copies blocks to the store and back, in threads, during steps."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import msgspec
import numpy as np

from ...protocol.arrays import int32_bytes, int32_view
from ...protocol.kv_transfer.store import (
    BlockLoad,
    BlockLookup,
    BlocksStored,
    StoreCommands,
    StoreReport,
)
from ...protocol.worker_messages import KVConnectorOutput
from ..device.waking_queue import WakingQueue
from .connector import KVConnector

if TYPE_CHECKING:
    from .block_memory import BlockMemory, Fence

logger = logging.getLogger(__name__)

STAGED_BYTES: Final = 64 * 1024 * 1024
"""Bytes of memory for copies of blocks that wait to be stored. While it is full, no more blocks are copied."""

MAX_STAGED_BLOCKS: Final = 1024

NUM_READERS: Final = 4

CLOSE_S: Final = 5.0
"""Seconds that the worker, when it exits, waits for blocks to be written."""

_NICENESS: Final = 10

_TICKS: Final = 4
"""Number of wake-ups of the watcher after which a read hangs."""

_IDLE: Final = float("inf")

Job: TypeAlias = Callable[[], None]
_Read: TypeAlias = Callable[["np.ndarray"], None]
"""A job of a reader's thread, which passes its buffer for `blocks_per_read` blocks."""


class _Transfer:
    """A load in progress: the remaining blocks, and the blocks that could not be loaded."""

    def __init__(self, load: BlockLoad, fence: Fence) -> None:
        self.transfer_id = load.transfer_id
        self.fence = fence
        self.blocks: list[int] = int32_view(load.block_ids).tolist()
        self.left = set(self.blocks)
        self.invalid: list[int] = []


class Store(Protocol):
    """A store of blocks by their keys. An OSError means that it failed."""

    def look_up(self, keys: Sequence[bytes]) -> bytes:
        """Return a byte for each key: 1 if the block is stored, else 0. May be called from any thread."""

    def append(self, key: bytes, data: memoryview) -> bool:
        """Store a block. Return False if the store takes no more blocks."""

    def read(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Fill the parts of a block. May be called from any thread.

        Return False if the block is missing or damaged; the parts may then contain anything.
        """

    def remove(self, keys: Sequence[bytes]) -> None:
        """Delete blocks."""

    def clear(self) -> None:
        """Delete all blocks."""

    def close(self) -> None:
        """Complete what has been stored."""


class StoreConnector(KVConnector):
    """Writes in one thread and reads in several threads.

    If the store fails, the connector turns itself off: blocks are not stored, and loads fail. While a read hangs, loads
    fail too. Nothing that it reads later enters the KV cache.

    Args:
        name: Names the store in log messages.
        memory: The KV cache.
        store: The store.
        blocks_per_read: The most blocks that a thread reads together. They are invalid together if the read hangs.
    """

    def __init__(
        self, name: str, memory: BlockMemory, store: Store, blocks_per_read: int = 1
    ) -> None:
        self._name = name
        self._memory = memory
        self._blocks = store
        self._blocks_per_read = blocks_per_read
        capacity = min(max(STAGED_BYTES // memory.block_bytes, 4), MAX_STAGED_BLOCKS)
        self._staging_kB = memory.host_buffer(capacity)
        self._free_rows: deque[int] = deque(range(capacity))
        self._capacity = capacity
        self._is_off = False
        self._begun = _NO_COMMANDS
        self._decode = msgspec.msgpack.Decoder(StoreCommands).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._reports: WakingQueue[KVConnectorOutput] = WakingQueue()
        self._report_mutex = threading.Lock()
        self._generation = 0
        self._loads = threading.Condition()
        """Lock for `_generation`, `_transfers`, `_num_writing` and `_hangs`."""
        self._transfers: set[_Transfer] = set()
        self._num_writing = 0
        self._hangs = False
        self._tick = 0
        """The number of times that the watcher woke up. In contrast to a clock, it stops with the process."""
        self._read_since = [_IDLE] * NUM_READERS
        """For each reader, the tick at which its read began."""
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[_Read] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="KV store writer", daemon=True)

    def _start(self, hang_s: float | None = None) -> None:
        """Start the threads. Subclasses call this method when they are complete.

        While a read of a block takes longer than `hang_s`, loads fail at once.
        """
        self._writer.start()
        threads = [("reader", partial(self._read, number)) for number in range(NUM_READERS)]
        if hang_s is not None:
            threads.append(("watcher", partial(self._watch, hang_s)))
        for name, target in threads:
            threading.Thread(target=target, name=f"KV store {name}", daemon=True).start()

    @abstractmethod
    def _report_state(self) -> None:
        """Report the capacity, and the blocks of the store if they can be listed, to the next core."""

    def _open(self) -> None:
        """Prepare the store. Called by the writer's thread before all jobs."""

    def _add_changes(self, report: StoreReport) -> None:
        """Add the blocks that the store has gained or lost to a report."""

    def _write_jobs(self) -> None:
        """Run the jobs of the writer until the last one."""
        while (job := self._jobs.get()) is not None:
            self._try(job)

    # Called by the worker's main thread

    @property
    def fd(self) -> int:
        """A file descriptor that is readable while there are reports."""
        return self._reports.fd

    def begin_step(self, metadata: bytes) -> None:
        """Copy the blocks to store, and queue the other commands for the store."""
        if not metadata:
            return
        commands = self._begun = self._decode(metadata)
        if commands.clears:
            self._jobs.put(self._blocks.clear)
        if commands.removed:
            self._jobs.put(lambda: self._remove(commands.removed))
        if commands.stores:
            self._stage(commands.stores, int32_view(commands.store_blocks).tolist())

    def start_loads(self) -> None:
        """Start the loads and lookups of the metadata that `begin_step` has received."""
        commands, self._begun = self._begun, _NO_COMMANDS
        if commands.loads:
            fence = self._memory.fence()
            for load in commands.loads:
                transfer = _Transfer(load, fence)
                with self._loads:
                    self._transfers.add(transfer)
                    if self._hangs:
                        self._give_up()
                for some in batched(load.keys, transfer.blocks, self._blocks_per_read):
                    self._reads.put(partial(self._read_blocks, transfer, *some))
        for lookup in commands.lookups:
            self._reads.put(partial(self._answer, lookup, self._generation))

    def _stage(self, keys: list[bytes], blocks: list[int]) -> None:
        """Copy blocks, so that later steps may overwrite them, and queue the copies for writing."""
        count = min(len(keys), len(self._free_rows))
        rows = [self._free_rows.popleft() for _ in range(count)]
        self._memory.read(blocks[:count], self._staging_kB, rows)
        self._jobs.put(lambda: self._append(keys[:count], rows))
        if count < len(keys):
            self._report(StoreReport(ended=keys[count:]))

    def take_reports(self) -> list[KVConnectorOutput]:
        """Return the reports since the last call."""
        return list(self._reports.take())

    def reset(self) -> None:
        """Discard loads in progress, and report the whole index to the next core."""
        with self._loads:
            self._generation += 1
            self._transfers.clear()
            self._loads.wait_for(lambda: not self._num_writing)
        with self._report_mutex:
            self._reports.clear()
        self._report_state()

    def close(self) -> None:
        """Store waiting blocks for at most a few seconds, and close the store."""
        self._jobs.put(None)
        self._writer.join(CLOSE_S)
        if self._writer.is_alive():
            logger.warning("%s: some blocks were not stored in time", self._name)

    # Reports

    def _report(
        self, report: StoreReport, *, received: Sequence[int] = (), invalid: Sequence[int] = ()
    ) -> None:
        """Report `report` together with the changes of the store."""
        with self._report_mutex:
            self._add_changes(report)
            report.is_off = self._is_off
            data = self._encode(report)
            self._reports.put(
                KVConnectorOutput(
                    finished_recving=list(received),
                    invalid_block_ids=int32_bytes(list(invalid)),
                    data=b"" if data == _NOTHING else data,
                )
            )

    # The writer's thread

    def _write(self) -> None:
        self._try(self._open)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self._write_jobs()
        self._try(self._blocks.close)

    def _try(self, job: Job) -> None:
        try:
            job()
        except Exception as error:
            self._turn_off(error)

    def _append(self, keys: list[bytes], rows: list[int]) -> None:
        num_bytes = 0
        try:
            self._memory.synchronize()
            for key, row in zip(keys, rows, strict=True):
                if self._is_off or not self._blocks.append(key, memoryview(self._staging_kB[row])):
                    break
                num_bytes += self._memory.block_bytes
        except OSError as error:
            self._turn_off(error)
        self._free_rows.extend(rows)
        self._report(StoreReport(ended=keys, num_bytes_written=num_bytes))

    def _remove(self, keys: list[bytes]) -> None:
        self._blocks.remove(keys)
        self._report(StoreReport(deleted=keys))

    def _turn_off(self, error: Exception) -> None:
        """Stop using the store, and log the reason once."""
        with self._report_mutex:
            was_off, self._is_off = self._is_off, True
        if not was_off:
            reason = isinstance(error, OSError) and (error.strerror or str(error))
            logger.error("disabling %s: %s", self._name, reason or repr(error))
            self._report(StoreReport(num_errors=1))

    # The readers' threads

    def _read(self, reader: int) -> None:
        buffer_kB = self._memory.host_buffer(self._blocks_per_read)
        while True:
            read = self._reads.get()
            self._read_since[reader] = self._tick
            read(buffer_kB)
            self._read_since[reader] = _IDLE

    def _read_blocks(
        self,
        transfer: _Transfer,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        buffer_kB: np.ndarray,
    ) -> None:
        """Read blocks to a buffer, and copy those that are intact to the KV cache."""
        if transfer not in self._transfers:
            return
        rows_kB = buffer_kB[: len(keys)]
        are_intact = self._read_from_store(keys, rows_kB)
        # A read may hang until another core has taken over, or until the block is computed.
        with self._loads:
            if transfer not in self._transfers:
                return
            self._num_writing += 1
        if all(are_intact):
            self._memory.write(blocks, rows_kB, transfer.fence)
        elif any(are_intact):
            intact = list(compress(blocks, are_intact))
            self._memory.write(intact, rows_kB[are_intact], transfer.fence)
        with self._loads:
            transfer.left.difference_update(blocks)
            transfer.invalid += [
                block for block, is_intact in zip(blocks, are_intact, strict=True) if not is_intact
            ]
            if not transfer.left and transfer in self._transfers:
                self._transfers.remove(transfer)
                self._end(transfer)
            self._num_writing -= 1
            self._loads.notify_all()

    def _read_from_store(self, keys: Sequence[bytes], rows_kB: np.ndarray) -> list[bool]:
        """Read blocks to the rows of a buffer. Return which of them are intact."""
        if not self._is_off:
            try:
                return self._read_rows(keys, [memoryview(row_B) for row_B in rows_kB])
            except OSError as error:
                self._turn_off(error)
        return [False] * len(keys)

    def _read_rows(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        return [self._blocks.read(key, [row]) for key, row in zip(keys, rows, strict=True)]

    def _answer(self, lookup: BlockLookup, generation: int, _: np.ndarray) -> None:
        mask = bytes(len(lookup.keys))
        try:
            if not self._is_off:
                mask = self._blocks.look_up(lookup.keys)
        except OSError as error:
            self._turn_off(error)
        with self._loads:
            if generation == self._generation:
                self._report(StoreReport(answers=[BlocksStored(lookup.transfer_id, mask)]))

    def _watch(self, hang_s: float) -> None:
        """Give up loads while a read hangs."""
        while True:
            time.sleep(hang_s / _TICKS)
            self._tick += 1
            hangs = self._tick - min(self._read_since) > _TICKS
            if hangs == self._hangs:
                continue
            if hangs:
                logger.error(
                    "%s has not answered a read for %g s; prompts are computed until it answers",
                    self._name,
                    hang_s,
                )
            else:
                logger.info("%s answers again", self._name)
            with self._loads:
                self._hangs = hangs
                self._report(StoreReport(hangs=hangs))
                if hangs:
                    self._give_up()

    def _give_up(self) -> None:
        """End all loads in progress. Those of their blocks that have not been read are invalid."""
        given_up, self._transfers = self._transfers, set()
        generation = self._generation
        self._loads.wait_for(lambda: not self._num_writing)
        if generation != self._generation:
            return
        for transfer in given_up:
            transfer.invalid += transfer.left
            self._end(transfer)

    def _end(self, transfer: _Transfer) -> None:
        num_invalid = len(transfer.invalid)
        self._report(
            StoreReport(
                num_errors=num_invalid,
                num_bytes_read=(len(transfer.blocks) - num_invalid) * self._memory.block_bytes,
            ),
            received=[transfer.transfer_id],
            invalid=transfer.invalid,
        )


def batched(
    keys: Sequence[bytes], blocks: Sequence[int], count: int
) -> Iterator[tuple[Sequence[bytes], Sequence[int]]]:
    """Yield `count` keys and blocks at a time; the last ones may be fewer."""
    for start in range(0, len(keys), count):
        yield keys[start : start + count], blocks[start : start + count]


_NOTHING: Final = msgspec.msgpack.encode(StoreReport())
_NO_COMMANDS: Final = StoreCommands()
