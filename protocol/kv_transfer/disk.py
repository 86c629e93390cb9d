"""Messages between the two sides of the disk KV connector, which identifies a block by its content key."""

from __future__ import annotations

from typing import Final

import msgspec

from ..messages import I32

DISK_CONNECTOR: Final = "disk"
"""The name of the connector in `--kv-transfer-config`."""


class DiskLoad(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Load the blocks with these keys into `block_ids` int32, for one transfer."""

    transfer_id: int
    keys: list[bytes]
    block_ids: I32


class DiskCommands(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The metadata of a step. Workers apply the fields in their order before the step is computed.

    `clears` deletes everything on disk, and `removed` the blocks with these keys. Then the blocks `store_blocks` int32
    are stored under the keys `stores`, and `loads` begin.
    """

    clears: bool = False
    removed: list[bytes] = []
    stores: list[bytes] = []
    store_blocks: I32 = b""
    loads: list[DiskLoad] = []


class DiskReport(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The report of one worker.

    The first reports list the whole index of the disk. The last of these sets `capacity`, the number of blocks that may
    be in the process of being stored. `stored` are now on the disk, and `removed` no longer.

    Every command is answered. A key to be stored is listed in `ended`, whether or not that succeeded. A key to be
    removed is listed in `deleted`, which is applied before `stored`. The numbers count since the last report. If
    `is_off`, the disk failed, and nothing is stored or found until the worker restarts.
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
