"""Messages of the direct KV connector: between its two sides, and between the workers of two replicas."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from ..messages import I32

DIRECT_CONNECTOR: Final = "direct"
"""The name of the connector in `--kv-transfer-config`."""

SOCKETS: Final = "sockets"
NIXL: Final = "nixl"
"""The values of `transport` in the connector's extra configuration: how blocks travel."""

EARLIER: Final = -1
"""The epoch of a request that has ended, of whose blocks only those are fetched that are still offered."""

MAX_NAME_CHARS: Final = 256
MAX_REFUSAL_CHARS: Final = 400
MAX_TP_SIZE: Final = 64
"""The maximum number of tensor-parallel ranks of another server."""

MAX_KEYS: Final = 64
"""The maximum number of blocks that one message requests."""

_Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
_Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TP_SIZE)]
_Key: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=64)]


def request_name(client_index: int, request_index: int, arrival_time: float) -> str:
    """Return the name under which another replica fetches the blocks of a request.

    It contains the arrival time, so that it is unique even after a restart.
    """
    return f"{client_index}.{request_index}.{arrival_time!r}"


class PullSettings(msgspec.Struct, frozen=True):
    """The settings in `kv_connector_extra_config` by which prefill servers fetch blocks of earlier turns.

    Attributes:
        bidirectional_kv_xfer: True if servers that generate offer their blocks, and servers that prefill fetch them.
        kv_recompute_threshold: The number of tokens below which a prefill server computes them instead.
    """

    bidirectional_kv_xfer: bool = False
    kv_recompute_threshold: Annotated[int, msgspec.Meta(ge=0)] = 64


ONE_WAY: Final = PullSettings()


class DirectSource(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The request whose blocks are fetched: its `name`, and where it is or was computed.

    If `replica` is not -1, that is a replica of this engine. Otherwise it is the engine whose first worker listens at
    `host` and `port`. `epoch` is that of the replica's core, 0 if unknown, or `EARLIER`. `tp_size` is the number of its
    tensor-parallel ranks, 0 if it is equal.
    """

    name: str
    replica: int = -1
    host: str = ""
    port: int = 0
    epoch: int = 0
    tp_size: int = 0


class DirectFetch(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Fetch the blocks with these keys into `block_ids` int32, for one transfer."""

    transfer_id: int
    source: DirectSource
    keys: list[bytes]
    block_ids: I32


class DirectCommands(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The metadata of a step. Workers apply the fields in their order before the step is computed.

    `clears` withdraws all offered blocks, and `withdrawn` the blocks with these keys, because this step may overwrite
    them. Then the complete blocks `offered_blocks` int32 are offered under the keys `offered`. No more blocks follow
    for the requests named in `ended`. The same is true for the requests in `held`, pairs of name and transfer id, whose
    blocks are kept until they were fetched. `last_blocks` has the transfer id, key and number of the last, incomplete
    block of such a request, which is offered as long as it is kept. The transfers in `expired` are no longer kept.
    Finally, `fetches` begin.
    """

    clears: bool = False
    withdrawn: list[bytes] = []
    offered: list[bytes] = []
    offered_blocks: I32 = b""
    ended: list[str] = []
    held: list[tuple[str, int]] = []
    last_blocks: list[tuple[int, bytes, int]] = []
    expired: list[int] = []
    fetches: list[DirectFetch] = []


class DirectReport(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Counts of one worker since its last report."""

    num_bytes_received: int = 0
    num_bytes_sent: int = 0
    num_errors: int = 0


# Worker that fetches -> worker that offers


class FetchBlocks(msgspec.Struct, tag="fetch", array_like=True, gc=False, frozen=True):
    """A request for blocks. Each block is answered by a `BlockFetched` as soon as it is complete.

    `number` is unique within the connection. For a block that is not offered yet, the answer waits until it is, or
    until the request `name` ends. It does not wait if the core of that `epoch` has exited.
    """

    number: int
    name: _Name
    fingerprint: bytes
    keys: Annotated[list[_Key], msgspec.Meta(max_length=MAX_KEYS)]
    takes_staged: bool = False
    """True if the peer can read blocks that are staged for NIXL."""
    epoch: int = 0
    """The epoch of the core that computes the request; 0 if it has computed it, and `EARLIER` if it has ended."""
    block_size: int = 0
    """The number of tokens in the peer's blocks."""
    tp_rank: _Rank = 0
    tp_size: _Rank = 0
    """The peer's tensor-parallel rank and their number if it needs only its part of blocks; 0 for whole blocks."""


class FetchEnded(msgspec.Struct, tag="ended", array_like=True, gc=False, frozen=True):
    """The end of a fetch: the blocks of a request were fetched, or will not be.

    `num_readers` workers in all fetch blocks of this request from the receiver.
    """

    name: _Name
    num_readers: _Rank = 1


class BlocksRead(msgspec.Struct, tag="read", array_like=True, gc=False, frozen=True):
    """The staged blocks with these tickets were read, or are no longer needed."""

    tickets: Annotated[list[int], msgspec.Meta(max_length=MAX_KEYS)]


FetchMessage: TypeAlias = FetchBlocks | FetchEnded | BlocksRead


# Worker that offers -> worker that fetches


class StagedBlock(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A block that a peer may read by NIXL: the address of `size` bytes in the sender's memory, and their CRC-32."""

    ticket: int
    address: int
    checksum: int
    size: int


class BlockFetched(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The answer for the key at `index` of a `FetchBlocks`.

    If `is_found`, a frame with the bytes of the block follows. If the block is `staged`, the frame is the metadata of
    the NIXL agent that has it, and a `BlocksRead` answers. `refusal` says why the peer can get no blocks at all.
    """

    number: int
    index: int
    is_found: bool
    staged: StagedBlock | None = None
    refusal: Annotated[str, msgspec.Meta(max_length=MAX_REFUSAL_CHARS)] = ""
