"""Messages of the direct KV connector: between its two halves, and between the workers of two replicas."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from ..messages import I32

DIRECT_CONNECTOR: Final = "direct"
"""The name of the connector."""

MAX_NAME_CHARS: Final = 256
MAX_KEYS: Final = 64
"""The maximum number of blocks that a message requests."""

_Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
_Key: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=64)]


def request_name(client_index: int, request_index: int, arrival_time: float) -> str:
    """Return the name under which another replica fetches the blocks of a request.

    The time makes it unique beyond the life of a process.
    """
    return f"{client_index}.{request_index}.{arrival_time!r}"


class DirectSource(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The request whose blocks are fetched: its `name`, and where it is or was computed.

    That is the replica `replica` of this engine, or the engine whose first worker listens at `host` and `port`.
    """

    name: str
    replica: int = -1
    host: str = ""
    port: int = 0


class DirectFetch(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The command to fetch the blocks with these keys into `block_ids` int32, for one transfer."""

    transfer_id: int
    source: DirectSource
    keys: list[bytes]
    block_ids: I32


class DirectCommands(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The metadata of a step, applied in the order of its fields before the step is computed.

    `clears` withdraws all blocks, and `withdrawn` those with these keys, because this step may overwrite them. Then the
    blocks `offered_blocks` int32, which are complete, are offered under the keys `offered`. No more blocks follow for
    the requests `ended`, which are pairs of name and transfer id; those whose blocks are held are also `held`.
    `expired` transfers are held no longer. Then `fetches` begin.
    """

    clears: bool = False
    withdrawn: list[bytes] = []
    offered: list[bytes] = []
    offered_blocks: I32 = b""
    ended: list[str] = []
    held: list[tuple[str, int]] = []
    expired: list[int] = []
    fetches: list[DirectFetch] = []


class DirectReport(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Counts of one worker since its last report."""

    num_bytes_received: int = 0
    num_bytes_sent: int = 0
    num_errors: int = 0


# worker that fetches -> worker that offers


class FetchBlocks(msgspec.Struct, tag="fetch", array_like=True, gc=False, frozen=True):
    """A request for blocks. Each is answered by a `BlockFetched` as soon as it is complete.

    `number` is unique within the connection. A block that is not there is awaited until the request `name` ends.
    """

    number: int
    name: _Name
    fingerprint: bytes
    keys: Annotated[list[_Key], msgspec.Meta(max_length=MAX_KEYS)]


class FetchEnded(msgspec.Struct, tag="ended", array_like=True, gc=False, frozen=True):
    """The end of a fetch: the blocks of a request were fetched, or will not be."""

    name: _Name


FetchMessage: TypeAlias = FetchBlocks | FetchEnded


# worker that offers -> worker that fetches


class BlockFetched(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The answer for key number `index` of a `FetchBlocks`. If it `is_found`, a frame with its bytes follows."""

    number: int
    index: int
    is_found: bool
