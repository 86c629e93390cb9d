"""The group of a trainer and the ranks that receive its tensors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ...protocol.weights.transfer import JoinGroup, TransferError


class TrainerGroup:
    """All receiving ranks of one server, which are threads of this process.

    They receive the same bytes into the same memory, so that it does not matter how many there are.

    Raises:
        TransferError: The trainer or another rank did not join in time.
    """

    def __init__(self, command: JoinGroup, num_ranks: int, timeout_s: float) -> None:
        self._pool = ThreadPoolExecutor(num_ranks, "rank")
        self._timeout = timedelta(seconds=timeout_s)
        ranks = range(command.first_rank, command.first_rank + num_ranks)
        try:
            self._members = [*self._pool.map(lambda rank: self._join(command, rank), ranks)]
        except (RuntimeError, ValueError) as error:
            self._pool.shutdown(wait=False)
            raise TransferError(
                f"the group at {command.address}:{command.port} was not complete within "
                f"{timeout_s:g} s: {_first_line(error)}"
            ) from None

    def _join(self, command: JoinGroup, rank: int) -> Any:
        host = f"[{command.address}]" if ":" in command.address else command.address
        address = f"tcp://{host}:{command.port}"
        store, *_ = next(rendezvous(address, rank, command.world_size, timeout=self._timeout))
        for prefix in command.prefixes:
            store = PrefixStore(prefix, store)
        return ProcessGroupGloo(store, rank, command.world_size, self._timeout)

    def receive(self, buffer: torch.Tensor) -> None:
        """Receive a broadcast of the trainer into a buffer of its size.

        Raises:
            TransferError: The trainer has left the group, or sent nothing in time. The group cannot be used any more.
        """
        try:
            for _ in self._pool.map(lambda member: _receive(member, buffer), self._members):
                pass
        except RuntimeError as error:
            raise TransferError(
                f"the trainer did not send what it announced: {_first_line(error)}"
            ) from None

    def close(self) -> None:
        """Leave the group."""
        self._members.clear()
        self._pool.shutdown(wait=False)


def _receive(member: Any, buffer: torch.Tensor) -> None:
    options = BroadcastOptions()
    options.rootRank = 0
    member.broadcast([buffer], options).wait()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
