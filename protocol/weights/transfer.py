"""Messages to the weight receiver, a process that receives tensors from a trainer and stages them as a checkpoint.

Every frontend may connect to its socket. A connection carries one command and its reply; both end when their sender
shuts down its half of the connection.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec

SOCKET: Final = "weights.receiver"
"""The socket of the receiver, in the run directory."""

STAGED: Final = "weights.received-"
"""Prefix of the directories in the run directory with tensors that were received."""

MAX_VALUES: Final = 1 << 20
"""Maximum number of values of a tensor in a reply."""


class JoinGroup(msgspec.Struct, tag="join", array_like=True, frozen=True):
    """Join the group of a trainer in place of the workers, and leave an earlier one.

    Attributes:
        address: The host of the trainer's `TCPStore`, at `port`.
        first_rank: The rank of the first worker; the trainer has rank 0.
        world_size: The number of ranks, those of the trainer included.
        prefixes: The prefixes of the group's keys in the store, from the first `PrefixStore` to the last.
        chunk_bytes: Bytes after which a broadcast of several tensors ends; 0 for one broadcast per tensor.
    """

    address: str
    port: int
    first_rank: int
    world_size: int
    prefixes: tuple[str, ...] = ()
    chunk_bytes: int = 0


class LeaveGroup(msgspec.Struct, tag="leave", array_like=True, frozen=True):
    """Leave the trainer's group and drop received tensors that were not loaded."""


class StartUpdate(msgspec.Struct, tag="start", array_like=True, frozen=True):
    """Begin an update of the current weights, and drop received tensors that were not loaded."""


class ReceiveTensors(msgspec.Struct, tag="receive", array_like=True, frozen=True):
    """Receive tensors that the trainer broadcasts in this order; without names, those of the last time.

    `is_flat` is set if one broadcast has all of them. `version` is the name of the weights; "" for none.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    is_flat: bool = False
    version: str = ""


class FinishUpdate(msgspec.Struct, tag="finish", array_like=True, frozen=True):
    """Complete the checkpoint of received tensors with the current weights, and return its path and version."""


class ReadTensor(msgspec.Struct, tag="read", array_like=True, frozen=True):
    """Return the first rows of a tensor in the files of the current weights, as floats."""

    name: str
    num_rows: int


TransferCommand: TypeAlias = (
    JoinGroup | LeaveGroup | StartUpdate | ReceiveTensors | FinishUpdate | ReadTensor
)


class TransferReply(msgspec.Struct, array_like=True, frozen=True):
    """The reply to a command.

    Attributes:
        problem: Why the command was not executed; "" if it was.
        param: The field with the invalid value; "" if the state of the transfer or the trainer is the reason.
        path: The checkpoint of an update.
        version: The name of its weights.
        values: The rows of a tensor.
    """

    problem: str = ""
    param: str = ""
    path: str = ""
    version: str = ""
    values: Any = None


class TransferError(Exception):
    """A command cannot be executed. `param` names the field with the invalid value, if one is the reason."""

    def __init__(self, problem: str, param: str = "") -> None:
        super().__init__(problem)
        self.param = param
