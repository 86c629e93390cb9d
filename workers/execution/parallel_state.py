"""The workers of one replica find each other, and each learns its place."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from ...protocol.config import ParallelConfig
from ...protocol.errors import EngineError, RunDirectoryError
from ..layers.spec import ModelSpec
from ..parallel.shard import ModelShard
from ..parallel.tensor_parallel import TensorParallel
from .pipeline import Pipeline

PATIENCE: Final = timedelta(days=14)
"""How long to wait for the other workers: one may be on a machine that joins tomorrow, and a worker that hangs is
found by the supervisor long before.

With a year gloo does not connect at all.
"""


@dataclass(frozen=True, slots=True)
class ParallelState:
    """One rank of a replica. Ranks count through a stage before the next stage."""

    tensor_parallel: TensorParallel = field(default_factory=TensorParallel)
    pipeline: Pipeline = field(default_factory=Pipeline)
    is_output_rank: bool = True
    """Whether this rank tells the core what was sampled."""

    def shard(self, spec: ModelSpec) -> ModelShard:
        """This rank's part of the model."""
        pipeline = self.pipeline
        return ModelShard.of_stage(spec, pipeline.stage, pipeline.num_stages, self.tensor_parallel)


def join_replica(
    address: str,
    rank: int,
    parallel: ParallelConfig,
    device: torch.device,
    *,
    is_batch_invariant: bool = False,
) -> ParallelState:
    """Meet the other workers of the replica at `address` and return this worker's place.

    `address` is any `init_method` of torch.distributed: a file that all ranks see, tcp://host:port, or env://. Nothing
    that an earlier start of the replica has left may be there. Raises RunDirectoryError if the file cannot be written.
    """
    if parallel.workers_per_core == 1:
        return ParallelState()
    size = parallel.tensor_parallel_size
    if address.startswith("file://") and sys.platform == "linux":
        # One machine: no other one shall be able to connect.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    on_cuda = device.type == "cuda"
    with _explaining_full_disk(address):
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            init_method=address,
            rank=rank,
            world_size=parallel.workers_per_core,
            device_id=device if on_cuda else None,
            timeout=PATIENCE,
        )
        group = dist.new_subgroups(size, timeout=PATIENCE)[0] if size > 1 else None
    stage, place = divmod(rank, size)
    return ParallelState(
        TensorParallel(place, size, group, sums_in_rank_order=is_batch_invariant or not on_cuda),
        Pipeline(stage, parallel.pipeline_parallel_size, size, rank),
        is_output_rank=rank == parallel.output_rank,
    )


@contextmanager
def _explaining_full_disk(address: str) -> Iterator[None]:
    """Raise RunDirectoryError for a file that torch has no room to write."""
    try:
        yield
    except RuntimeError as error:
        path = address.removeprefix("file://")
        for reason in map(os.strerror, (errno.ENOSPC, errno.EDQUOT)):
            if path != address and reason in str(error):
                raise RunDirectoryError(path, reason) from error
        raise


def leave_replica() -> None:
    """Close the connections to the other workers."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def explaining_lost_workers() -> Iterator[None]:
    """Raise EngineError when another worker of the replica is gone."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        # Further lines are a stack of torch's own.
        reason = str(error).partition("\n")[0]
        raise EngineError(
            "the connection to another worker of the replica is lost; if that one's messages do not say why, "
            f"this may: {reason}"
        ) from error
