"""Messages between the two sides of the KV connectors to a store, which find a block by its content key.

The stores are a directory (`disk`) and LMCache (`LMCacheConnector`).
"""

from __future__ import annotations

from typing import Final

import msgspec

from ..messages import I32

DISK_CONNECTOR: Final = "disk"
LMCACHE_CONNECTOR: Final = "LMCacheConnector"
"""The names of the connectors in `--kv-transfer-config`."""


class BlockLoad(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Load the blocks with these keys into `block_ids` int32, for one transfer."""

    transfer_id: int
    keys: list[bytes]
    block_ids: I32


class BlockLookup(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Look up which of the blocks with these keys are stored, for one request."""

    transfer_id: int
    keys: list[bytes]


class BlocksStored(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The answer to a `BlockLookup`: a byte for each key, 1 if the worker can load the block, else 0."""

    transfer_id: int
    mask: bytes


class StoreCommands(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The metadata of a step. Workers apply the fields in their order before the step is computed.

    `clears` deletes everything in the store, and `removed` the blocks with these keys. Then the blocks `store_blocks`
    int32 are stored under the keys `stores`, and `loads` and `lookups` begin.
    """

    clears: bool = False
    removed: list[bytes] = []
    stores: list[bytes] = []
    store_blocks: I32 = b""
    loads: list[BlockLoad] = []
    lookups: list[BlockLookup] = []


class StoreReport(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The report of one worker.

    The first reports list the whole index of a disk. The last of these sets `capacity`, the number of blocks that may
    be in the process of being stored. `stored` are now on the disk, and `removed` no longer. Stores without an index
    report neither; their `answers` say what they have.

    Every command is answered. A key to be stored is listed in `ended`, whether or not that succeeded. A key to be
    removed is listed in `deleted`, which is applied before `stored`. The numbers count since the last report. If
    `is_off`, the store failed, and nothing is stored or found until the worker restarts. `hangs` is true if reads have
    begun to hang, false if the store answers again, and None if nothing has changed.
    """

    capacity: int = 0
    deleted: list[bytes] = []
    stored: list[bytes] = []
    removed: list[bytes] = []
    ended: list[bytes] = []
    num_bytes_read: int = 0
    num_bytes_written: int = 0
    num_errors: int = 0
    is_off: bool = False
    answers: list[BlocksStored] = []
    hangs: bool | None = None
