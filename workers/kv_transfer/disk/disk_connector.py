"""The worker side of the KV cache on disk."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ....protocol.errors import ConfigError
from ....protocol.kv_transfer.store import DISK_CONNECTOR, StoreReport
from ....protocol.worker_messages import KVConnectorOutput
from ..connector import ConnectorContext, register_connector
from ..store_connector import Job, StoreConnector
from .block_store import BlockStore
from .directory import SharedDirectory

logger = logging.getLogger(__name__)

GIB: Final = 1 << 30

REFRESH_S: Final = 1.0
"""Seconds between two checks for changes by other processes."""

HANG_S: Final = 5.0
"""Seconds that the read of a block may take. After them, the disk hangs."""

KEYS_PER_REPORT: Final = 8192

READ_BYTES: Final = 2 << 20
"""Bytes that a thread reads together. Each read takes locks, so larger ones are faster if blocks are small."""


class DiskConnector(StoreConnector):
    """Stores blocks in a directory. The writer's thread also maintains the index.

    Raises:
        ConfigError: The directory cannot be used.
    """

    def __init__(self, context: ConnectorContext) -> None:
        cache = context.config.cache
        assert cache.disk_path is not None
        self._path = cache.disk_path
        try:
            directory = SharedDirectory(Path(self._path), int(cache.disk_gib * GIB))
            self._store = BlockStore(directory, context.fingerprint, context.memory.block_bytes)
        except OSError as error:
            raise ConfigError(f"--kv-disk {self._path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"--kv-disk-gib {cache.disk_gib:g}: {error}") from error
        self._is_indexed = threading.Event()
        blocks_per_read = max(1, READ_BYTES // context.memory.block_bytes)
        name = f"the KV cache on disk: {self._path}"
        super().__init__(name, context.memory, self._store, blocks_per_read)
        self._start(HANG_S)

    def _report_state(self) -> None:
        if self._is_indexed.is_set():
            self._report_index()
        else:
            self._jobs.put(self._report_index)

    def _add_changes(self, report: StoreReport) -> None:
        report.stored, report.removed = self._store.take_changes()

    def _report_index(self) -> None:
        """Report all blocks of the store, and finally the capacity."""
        with self._report_mutex:
            self._store.take_changes()
            keys = [] if self._is_off else self._store.keys()
            for start in range(0, max(len(keys), 1), KEYS_PER_REPORT):
                end = start + KEYS_PER_REPORT
                report = StoreReport(
                    capacity=0 if end < len(keys) else self._capacity,
                    stored=keys[start:end],
                    is_off=self._is_off,
                    hangs=self._hangs,
                )
                self._reports.put(KVConnectorOutput(data=self._encode(report)))

    def _read_rows(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        return self._store.read_blocks(keys, [[row] for row in rows])

    # The writer's thread

    def _write_jobs(self) -> None:
        next_refresh = time.monotonic() + REFRESH_S
        while True:
            job: Job | None = self._refresh
            with contextlib.suppress(queue.Empty):
                job = self._jobs.get(timeout=max(next_refresh - time.monotonic(), 0))
            if job is None:
                return
            if job == self._refresh:
                next_refresh = time.monotonic() + REFRESH_S
            self._try(job)

    def _open(self) -> None:
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
            self._report(StoreReport())


register_connector(DISK_CONNECTOR, DiskConnector)
