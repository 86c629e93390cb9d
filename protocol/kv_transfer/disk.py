"""Messages between the two halves of the KV connector to the disk. A block is identified by its content key."""

from __future__ import annotations

from typing import Final

import msgspec

from ..messages import I32

DISK_CONNECTOR: Final = "disk"
"""The name of the connector."""


class DiskLoad(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Loads the blocks with these keys into `block_ids` int32, for one transfer."""

    transfer_id: int
    keys: list[bytes]
    block_ids: I32


class DiskCommands(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The metadata of a step, applied in the order of its fields before the step is computed.

    `clears` deletes everything, and `removed` the blocks with these keys. Then the blocks `store_blocks` int32 are
    stored under the keys `stores`, and `loads` begin.
    """

    clears: bool = False
    removed: list[bytes] = []
    stores: list[bytes] = []
    store_blocks: I32 = b""
    loads: list[DiskLoad] = []


class DiskReport(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The report of one worker.

    The first ones have the whole index, and the last of them has a `capacity`: how many blocks may be on their way to
    the disk. `stored` are on the disk now, and `removed` are no longer. Every command is answered: a key to be stored
    is among `ended`, whether it could be stored or not, and one to be removed among `deleted`, which is applied before
    `stored`. The numbers count since the last report. If the disk `is_off`, nothing is stored or found until the worker
    restarts.
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
