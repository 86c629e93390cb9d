"""The scheduler side of KV connectors to a store: which blocks are stored and deleted, and when."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from ....protocol.arrays import int32_bytes
from ....protocol.kv_transfer.store import BlockLoad, StoreCommands, StoreReport
from ....protocol.worker_messages import SchedulerOutput
from ...state.request import Request
from ..connector import BlockConnector

_decode_report = msgspec.msgpack.Decoder(StoreReport).decode
_encode = msgspec.msgpack.Encoder().encode


class StoreTier(BlockConnector):
    """Stores every block soon after it is full. Subclasses decide which blocks are found.

    A block waits in `_pending` until a step is scheduled after the one that fills it. The metadata of that step reaches
    the workers when the block is complete. They copy the block then, and store the copy in the background. At most
    `_capacity` blocks are being stored at a time.
    """

    def __init__(self, num_workers: int = 1) -> None:
        self._num_workers = num_workers
        self._step = 1
        """The number of the next step."""
        self._find_block: Callable[[bytes], int | None] = lambda key: None
        self._capacity = 0
        self._capacities: dict[int, int] = {}
        self._pending: dict[bytes, int] = {}
        """The keys of blocks to be stored, with the number of the step that was next when each became findable."""
        self._evicted: deque[tuple[bytes, int]] = deque()
        """The blocks (key, number) that the next step both stores and overwrites."""
        self._storing: Counter[bytes] = Counter()
        """For each block key, how many workers have not yet confirmed the command to store it."""
        self._commands = StoreCommands()
        self._counts: Counter[str] = Counter()
        self._is_off = False
        self._hanging: set[int] = set()
        """The ranks of the workers whose store hangs."""

    def observe_pool(self, find_block: Callable[[bytes], int | None], block_size: int) -> None:
        """Receive the function that returns the block with a given content key."""
        self._find_block = find_block

    @abstractmethod
    def _is_stored(self, key: bytes) -> bool:
        """Return whether the store is known to have a block."""

    @abstractmethod
    def _remove(self, keys: list[bytes]) -> None:
        """Delete blocks from the store."""

    @abstractmethod
    def _apply(self, rank: int, report: StoreReport) -> None:
        """Apply what a report of worker `rank` says about the blocks of the store."""

    # Changes of the prefix cache

    def blocks_cached(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Store these blocks once they are complete, unless they are stored already."""
        if self._is_off:
            return
        storing, is_stored = self._storing, self._is_stored
        for key in keys:
            if key not in storing and not is_stored(key):
                # Several blocks may have this content. The one that is found may be the last to be filled.
                self._pending[key] = self._step

    def block_evicted(self, key: bytes, block_id: int) -> None:
        """Store an evicted block before the next step overwrites it, if the block is complete and there is space."""
        step = self._pending.pop(key, self._step)
        if step < self._step and len(self._storing) + len(self._evicted) < self._capacity:
            self._evicted.append((key, block_id))

    def blocks_removed(self, keys: Iterable[bytes]) -> None:
        """Cancel the storing of these blocks, and delete them from the store."""
        keys = list(keys)
        for key in keys:
            self._pending.pop(key, None)
        self._remove(keys)
        if self._evicted:
            gone = set(keys)
            self._evicted = deque(entry for entry in self._evicted if entry[0] not in gone)

    def cache_cleared(self) -> None:
        """Delete everything from the store."""
        self._pending.clear()
        self._evicted.clear()
        self._commands.clears = True
        self._commands.removed.clear()

    # Calls about requests

    def load_blocks(
        self, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> None:
        """Load blocks with the next step's metadata."""
        self._commands.loads.append(
            BlockLoad(request.transfer_id, list(keys), int32_bytes(list(block_ids)))
        )

    # Messages to and from the workers

    def needs_step(self) -> bool:
        """Return whether there is something to store, delete, load or look up, and enough space for it."""
        commands = self._commands
        if commands.loads or commands.lookups or commands.removed or commands.clears:
            return bool(self._capacity)
        return bool(self._pending) and len(self._storing) < self._capacity

    def is_ready(self) -> bool:
        """Return whether all workers have reported what they store."""
        return len(self._capacities) == self._num_workers

    def is_flushed(self) -> bool:
        """Return whether no block is waiting to be stored or being stored."""
        return not (self._capacity and (self._pending or self._storing))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> bytes:
        """Return the commands for the workers, encoded."""
        self._step = scheduler_output.step + 1
        if not self._capacity:
            self._evicted.clear()
            return b""
        self._choose_stores(scheduler_output.step)
        commands = self._commands
        if commands == _NO_COMMANDS:
            return b""
        self._commands = StoreCommands()
        return _encode(commands)

    def _choose_stores(self, step: int) -> None:
        blocks: list[int] = []
        stores = self._commands.stores
        for key, block in self._evicted:
            if key not in self._storing:
                stores.append(key)
                blocks.append(block)
                self._storing[key] = self._num_workers
        self._evicted.clear()
        # Copying blocks delays the step, so limit how many are copied in one.
        room = min(self._capacity - len(self._storing), max(1, self._capacity // 4))
        if room > 0 and self._pending:
            ready = []
            for key, since in self._pending.items():
                if since < step:
                    ready.append(key)
                    if len(ready) == room:
                        break
            for key in ready:
                del self._pending[key]
                found = self._find_block(key)
                if found is not None:
                    stores.append(key)
                    blocks.append(found)
                    self._storing[key] = self._num_workers
        if blocks:
            self._commands.store_blocks = int32_bytes(blocks)

    def receive(self, rank: int, data: bytes) -> None:
        """Apply a worker's report."""
        report = _decode_report(data)
        if report.capacity:
            self._capacities[rank] = report.capacity
            if len(self._capacities) == self._num_workers:
                self._capacity = min(self._capacities.values())
        if report.hangs is not None:
            (self._hanging.add if report.hangs else self._hanging.discard)(rank)
        self._apply(rank, report)
        for key in report.ended:
            count_down(self._storing, key)
        self._counts["read_bytes"] += report.num_bytes_read
        self._counts["written_bytes"] += report.num_bytes_written
        self._counts["errors"] += report.num_errors
        if report.is_off:
            self._turn_off()

    def _turn_off(self) -> None:
        """Stop storing and finding blocks, after a worker's store failed. The workers end loads in progress."""
        self._is_off = True
        self._pending.clear()
        self._evicted.clear()
        self._storing.clear()
        self._commands.removed.clear()
        self._commands.clears = False

    def take_stats(self) -> dict[str, float]:
        """Return counts since the last call."""
        counts, self._counts = self._counts, Counter()
        return {name: float(count) for name, count in counts.items() if count}


_NO_COMMANDS: Final = StoreCommands()


def count_down(counts: Counter[bytes], key: bytes) -> None:
    """Subtract one from a count, and delete it when it is zero."""
    counts[key] -= 1
    if counts[key] <= 0:
        del counts[key]
