"""Moves blocks between workers with NIXL, which uses RDMA, shared memory or TCP, depending on what UCX finds."""

from __future__ import annotations

import itertools
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from ...protocol.errors import ConfigError
from ...protocol.kv_transfer.direct import StagedBlock
from ..device import host_memory

NUM_SLOTS: Final = 32
MAX_BYTES: Final = 256 << 20
"""Limits of the memory from which peers read, and of the memory that this worker reads into."""

LEASE_S: Final = 30.0
"""Seconds after which a staged block may be overwritten although no peer has reported that it was read."""

Arrived: TypeAlias = Callable[[memoryview | None], None]
"""A function that receives the bytes of a block, or None if they could not be read."""


class _Read:
    """A read that NIXL performs."""

    def __init__(self, handle: Any, slot: int, staged: StagedBlock, arrived: Arrived) -> None:
        self.handle, self.slot = handle, slot
        self.staged, self.arrived = staged, arrived


class NixlStaging:
    """Host memory with slots for blocks, from which the NIXL agents of peers read.

    The KV cache itself is not registered. A sender copies a block to a slot, and the peer reads that slot into one of
    its own. So no peer can write to the cache, or read a block while a step overwrites it. A checksum
    detects a slot that was overwritten before it was read. The agent has no thread, because such a thread would never
    sleep; `progress` must be called often while `is_active`. All methods are called by one thread.

    Args:
        block_bytes: The size of a block in bytes.
        backends: The backends of NIXL.

    Raises:
        ConfigError: NIXL is not installed, or its agent does not start.
    """

    def __init__(self, block_bytes: int, backends: Sequence[str] = ("UCX",)) -> None:
        num_slots = max(2, min(NUM_SLOTS, MAX_BYTES // block_bytes))
        self._slots_kB: NDArray[np.uint8] = host_memory.allocate(
            2 * num_slots * block_bytes
        ).reshape(2 * num_slots, block_bytes)
        self._free_to_send = list(range(num_slots))
        self._free_to_read = list(range(num_slots, 2 * num_slots))
        self._tickets = itertools.count()
        self._staged: dict[int, tuple[int, float]] = {}
        """The slot of each staged block, and when it was staged, by ticket and in the order of time."""
        self._reads: list[_Read] = []
        self.num_bytes_read = 0
        self._waiting: deque[tuple[bytes, StagedBlock, Arrived]] = deque()
        try:
            from nixl import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ConfigError(
                f"the transport 'nixl' cannot be imported ({error}); install the extra engine-serve[nixl], "
                "or use kv_connector 'direct' without it"
            ) from None
        try:
            config = nixl_agent_config(enable_prog_thread=False, backends=list(backends))
            self._agent: Any = nixl_agent(uuid4().hex, config)
            region = (self._slots_kB.ctypes.data, self._slots_kB.nbytes, 0, "")
            self._registered: Any = self._agent.register_memory([region], "DRAM")
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            raise ConfigError(
                f"NIXL cannot start its agent with the backends {', '.join(backends)}: {error}"
            ) from None

    @property
    def is_active(self) -> bool:
        """True while a block is read here, or may be read by a peer."""
        return bool(self._reads or self._staged)

    # sender

    def stage(self, data: bytes) -> StagedBlock | None:
        """Copy a block to a slot. Return None if all slots are in use."""
        if not self._free_to_send:
            return None
        slot, ticket = self._free_to_send.pop(), next(self._tickets)
        self._slots_kB[slot, : len(data)] = np.frombuffer(data, np.uint8)
        self._staged[ticket] = slot, time.monotonic()
        return StagedBlock(ticket, self._address(slot), zlib.crc32(data), len(data))

    def release(self, tickets: Sequence[int]) -> None:
        """Free the slots of blocks that a peer has read, or no longer needs."""
        for ticket in tickets:
            found = self._staged.pop(ticket, None)
            if found is not None:
                self._free_to_send.append(found[0])

    # receiver

    def read(self, metadata: bytes, staged: StagedBlock, arrived: Arrived) -> None:
        """Read a staged block of the agent that `metadata` describes, as soon as a slot is free."""
        self._waiting.append((metadata, staged, arrived))
        self._start_reads()

    def _start_reads(self) -> None:
        while self._waiting and self._free_to_read:
            metadata, staged, arrived = self._waiting.popleft()
            slot = self._free_to_read.pop()
            try:
                handle = self._post(metadata, staged, slot)
            # NIXL's errors have no public base class.
            except Exception:
                self._free_to_read.append(slot)
                arrived(None)
                continue
            self._reads.append(_Read(handle, slot, staged, arrived))

    def _post(self, metadata: bytes, staged: StagedBlock, slot: int) -> Any:
        agent, size = self._agent, staged.size
        if not 0 < size <= self._slots_kB.shape[1]:
            raise ValueError(f"a peer has staged {size} bytes")
        name = agent.add_remote_agent(metadata)
        local = agent.get_xfer_descs([(self._address(slot), size, 0)], "DRAM")
        remote = agent.get_xfer_descs([(staged.address, size, 0)], "DRAM")
        handle = agent.initialize_xfer("READ", local, remote, name)
        agent.transfer(handle)
        return handle

    def progress(self) -> None:
        """Advance all transfers, and report the blocks that have arrived."""
        # Nobody sends notifications, but this also advances what peers read here. It raises an error if a peer has
        # exited.
        with suppress(Exception):
            self._agent.get_new_notifs()
        reads, self._reads = self._reads, []
        for read in reads:
            state = self._state_of(read.handle)
            if state == "PROC":
                self._reads.append(read)
                continue
            data = memoryview(self._slots_kB[read.slot])[: read.staged.size]
            is_right = state == "DONE" and zlib.crc32(data) == read.staged.checksum
            self.num_bytes_read += len(data) * is_right
            read.arrived(data if is_right else None)
            self._free_to_read.append(read.slot)
        self._start_reads()
        limit = time.monotonic() - LEASE_S
        self.release([ticket for ticket, (_, since) in self._staged.items() if since < limit])

    def _state_of(self, handle: Any) -> str:
        try:
            state: str = self._agent.check_xfer_state(handle)
            if state != "PROC":
                handle.release()
        except Exception:
            # The peer has exited.
            return "ERR"
        return state

    def _address(self, slot: int) -> int:
        address: int = self._slots_kB[slot].ctypes.data
        return address

    def close(self) -> None:
        """Drop all transfers and the agent."""
        self._waiting.clear()
        self._reads.clear()
        self._staged.clear()
        self._agent.deregister_memory(self._registered)
        self._agent = None
