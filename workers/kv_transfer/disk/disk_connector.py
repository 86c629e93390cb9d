"""The worker side of the KV cache on disk, which copies blocks to a store and back, in threads, during steps."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
import numpy as np

from ....protocol.arrays import int32_bytes, int32_view
from ....protocol.errors import ConfigError
from ....protocol.kv_transfer.disk import DISK_CONNECTOR, DiskCommands, DiskLoad, DiskReport
from ....protocol.worker_messages import KVConnectorOutput
from ..connector import ConnectorContext, KVConnector, register_connector
from ..waking_queue import WakingQueue
from .block_store import BlockStore
from .directory import SharedDirectory

if TYPE_CHECKING:
    from ..block_memory import BlockMemory, Fence

logger = logging.getLogger(__name__)

GIB: Final = 1 << 30

STAGED_BYTES: Final = 64 * 1024 * 1024
"""Bytes of memory for copies of blocks that wait for the disk. While it is full, no more blocks are copied."""

MAX_STAGED_BLOCKS: Final = 1024

NUM_READERS: Final = 4

REFRESH_S: Final = 1.0
"""Seconds between two checks for changes by other processes."""

CLOSE_S: Final = 5.0
"""Seconds that the worker, when it exits, waits for blocks to be written."""

KEYS_PER_REPORT: Final = 8192

_NICENESS: Final = 10

_Job: TypeAlias = Callable[[], None]


class _Transfer:
    """A load in progress: the remaining blocks, and the blocks that could not be loaded."""

    def __init__(self, load: DiskLoad, generation: int, fence: Fence) -> None:
        self.transfer_id = load.transfer_id
        self.generation = generation
        self.fence = fence
        self.num_blocks = self.num_left = len(load.keys)
        self.invalid: list[int] = []


class DiskConnector(KVConnector):
    """Writes in one thread, which also maintains the index, and reads in several threads.

    If the disk is full or failing, the connector turns itself off: blocks are not stored, and loads fail.

    Raises:
        ConfigError: The directory cannot be used.
    """

    def __init__(self, context: ConnectorContext) -> None:
        cache = context.config.cache
        assert cache.disk_path is not None
        self._memory: BlockMemory = context.memory
        self._path = cache.disk_path
        block_bytes = self._memory.block_bytes
        try:
            directory = SharedDirectory(Path(self._path), int(cache.disk_gib * GIB))
            self._store = BlockStore(directory, context.fingerprint, block_bytes)
        except OSError as error:
            raise ConfigError(f"--kv-disk {self._path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"--kv-disk-gib {cache.disk_gib:g}: {error}") from error
        capacity = min(max(STAGED_BYTES // block_bytes, 4), MAX_STAGED_BLOCKS)
        self._staging_kB = self._memory.host_buffer(capacity)
        self._free_rows: deque[int] = deque(range(capacity))
        self._capacity = capacity
        self._is_off = False
        self._is_indexed = threading.Event()
        self._decode = msgspec.msgpack.Decoder(DiskCommands).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._reports: WakingQueue[KVConnectorOutput] = WakingQueue()
        self._report_mutex = threading.Lock()
        self._generation = 0
        self._loads = threading.Condition()
        """Lock for `_generation` and `_num_reading`."""
        self._num_reading = 0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[tuple[_Transfer, bytes, int]] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="KV disk writer", daemon=True)
        self._writer.start()
        for _ in range(NUM_READERS):
            threading.Thread(target=self._read, name="KV disk reader", daemon=True).start()

    # Called by the worker's main thread

    @property
    def fd(self) -> int:
        """A file descriptor that is readable while there are reports."""
        return self._reports.fd

    def begin_step(self, metadata: bytes) -> None:
        """Copy the blocks to store, and start to load others."""
        if not metadata:
            return
        commands = self._decode(metadata)
        if commands.clears:
            self._jobs.put(self._store.clear)
        if commands.removed:
            self._jobs.put(lambda: self._remove(commands.removed))
        if commands.stores:
            self._stage(commands.stores, int32_view(commands.store_blocks).tolist())
        if commands.loads:
            fence = self._memory.fence()
            for load in commands.loads:
                transfer = _Transfer(load, self._generation, fence)
                for key, block in zip(load.keys, int32_view(load.block_ids).tolist(), strict=True):
                    self._reads.put((transfer, key, block))

    def _stage(self, keys: list[bytes], blocks: list[int]) -> None:
        """Copy blocks, so that later steps may overwrite them, and queue the copies for writing."""
        count = min(len(keys), len(self._free_rows))
        rows = [self._free_rows.popleft() for _ in range(count)]
        self._memory.read(blocks[:count], self._staging_kB, rows)
        self._jobs.put(lambda: self._append(keys[:count], rows))
        if count < len(keys):
            self._report(DiskReport(ended=keys[count:]))

    def take_reports(self) -> list[KVConnectorOutput]:
        """Return the reports since the last call."""
        return list(self._reports.take())

    def reset(self) -> None:
        """Wait for reads in progress, discard the others, and report the whole index to the next core."""
        with self._loads:
            self._generation += 1
            self._loads.wait_for(lambda: not self._num_reading)
        with self._report_mutex:
            self._reports.clear()
        if self._is_indexed.is_set():
            self._report_index()
        else:
            self._jobs.put(self._report_index)

    def close(self) -> None:
        """Write waiting blocks for at most a few seconds, and seal the last segment."""
        self._jobs.put(None)
        self._writer.join(CLOSE_S)
        if self._writer.is_alive():
            logger.warning("some KV-cache blocks were not written to %s in time", self._path)

    # Reports

    def _report(
        self, report: DiskReport, *, received: Sequence[int] = (), invalid: Sequence[int] = ()
    ) -> None:
        """Report `report` together with the changes of the store."""
        with self._report_mutex:
            changes = self._store.take_changes()
            report.stored, report.removed = changes
            report.is_off = self._is_off
            data = self._encode(report)
            self._reports.put(
                KVConnectorOutput(
                    finished_recving=list(received),
                    invalid_block_ids=int32_bytes(list(invalid)),
                    data=b"" if data == _NOTHING else data,
                )
            )

    def _report_index(self) -> None:
        """Report all blocks of the store, and finally the capacity."""
        with self._report_mutex:
            self._store.take_changes()
            keys = [] if self._is_off else self._store.keys()
            for start in range(0, max(len(keys), 1), KEYS_PER_REPORT):
                end = start + KEYS_PER_REPORT
                report = DiskReport(
                    capacity=0 if end < len(keys) else self._capacity,
                    stored=keys[start:end],
                    is_off=self._is_off,
                )
                self._reports.put(KVConnectorOutput(data=self._encode(report)))

    # The writer's thread

    def _write(self) -> None:
        is_ending = False
        self._try(self._read_index)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        next_refresh = time.monotonic() + REFRESH_S
        while not is_ending:
            job: _Job | None = self._refresh
            with contextlib.suppress(queue.Empty):
                job = self._jobs.get(timeout=max(next_refresh - time.monotonic(), 0))
            if job == self._refresh:
                next_refresh = time.monotonic() + REFRESH_S
            is_ending = job is None
            self._try(job or self._store.close)

    def _try(self, job: _Job) -> None:
        try:
            job()
        except Exception as error:
            self._turn_off(error)

    def _read_index(self) -> None:
        start = time.monotonic()
        self._store.refresh()
        num_bytes = len(self._store) * self._memory.block_bytes
        logger.info(
            "KV cache on disk: %d blocks (%.2f GiB) in %s, found in %.2f s",
            len(self._store),
            num_bytes / GIB,
            self._path,
            time.monotonic() - start,
        )
        self._is_indexed.set()

    def _refresh(self) -> None:
        if self._is_off:
            return
        self._store.refresh()
        if self._store.has_changes:
            self._report(DiskReport())

    def _append(self, keys: list[bytes], rows: list[int]) -> None:
        num_bytes = 0
        try:
            self._memory.synchronize()
            for key, row in zip(keys, rows, strict=True):
                if self._is_off or not self._store.append(key, memoryview(self._staging_kB[row])):
                    break
                num_bytes += self._memory.block_bytes
        except OSError as error:
            self._turn_off(error)
        self._free_rows.extend(rows)
        self._report(DiskReport(ended=keys, num_bytes_written=num_bytes))

    def _remove(self, keys: list[bytes]) -> None:
        self._store.remove(keys)
        self._report(DiskReport(deleted=keys))

    def _turn_off(self, error: Exception) -> None:
        """Stop using the disk, and log the reason once."""
        with self._report_mutex:
            was_off, self._is_off = self._is_off, True
        if not was_off:
            reason = error.strerror if isinstance(error, OSError) else repr(error)
            logger.error("disabling the KV cache on disk: %s: %s", self._path, reason)
            self._report(DiskReport(num_errors=1))

    # The readers' threads

    def _read(self) -> None:
        buffer_1B: np.ndarray | None = None
        if not self._memory.is_on_host:
            buffer_1B = self._memory.host_buffer(1)
        while True:
            transfer, key, block = self._reads.get()
            with self._loads:
                if transfer.generation != self._generation:
                    continue
                self._num_reading += 1
            is_loaded = not self._is_off and self._load(transfer, key, block, buffer_1B)
            with self._loads:
                transfer.num_left -= 1
                if not is_loaded:
                    transfer.invalid.append(block)
                if not transfer.num_left and transfer.generation == self._generation:
                    self._end(transfer)
                self._num_reading -= 1
                self._loads.notify_all()

    def _load(
        self, transfer: _Transfer, key: bytes, block: int, buffer_1B: np.ndarray | None
    ) -> bool:
        try:
            if buffer_1B is None:
                return self._store.read(key, self._memory.views(block))
            if not self._store.read(key, [memoryview(buffer_1B[0])]):
                return False
            self._memory.write([block], buffer_1B, transfer.fence)
        except OSError as error:
            self._turn_off(error)
            return False
        return True

    def _end(self, transfer: _Transfer) -> None:
        num_invalid = len(transfer.invalid)
        self._report(
            DiskReport(
                num_errors=num_invalid,
                num_bytes_read=(transfer.num_blocks - num_invalid) * self._memory.block_bytes,
            ),
            received=[transfer.transfer_id],
            invalid=transfer.invalid,
        )


_NOTHING: Final = msgspec.msgpack.encode(DiskReport())

register_connector(DISK_CONNECTOR, DiskConnector)
