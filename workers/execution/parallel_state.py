"""Connect the workers of one replica, or of all replicas if these divide the experts."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import msgspec
import torch
import torch.distributed as dist

from ...protocol.config import ParallelConfig
from ...protocol.errors import PeerLostError, RunDirectoryError
from ..device.dtypes import HostDevice, torch_device
from ..device.lazy_torch import is_torch_loaded
from ..layers.parallel.expert_group import ExpertGroup
from ..layers.parallel.shard import ModelShard
from ..layers.parallel.tensor_parallel import TensorParallel
from ..layers.spec import ModelSpec
from .pipeline import Pipeline

TIMEOUT: Final = timedelta(days=14)
"""Timeout for connecting to other workers, one of which may be on a machine that joins days later.

The supervisor detects a worker that hangs long before. Gloo cannot connect with a timeout of a year.
"""


class ParallelState(msgspec.Struct, frozen=True):
    """The position of one worker in its replica. Ranks are numbered stage by stage."""

    tensor_parallel: TensorParallel = msgspec.field(default_factory=TensorParallel)
    pipeline: Pipeline = msgspec.field(default_factory=Pipeline)
    is_output_rank: bool = True
    """True if this rank sends the sampled tokens to the core."""
    has_whole_experts: bool = False
    """True if the ranks of a stage divide the experts, instead of the elements of each expert."""
    expert_group: ExpertGroup | None = None
    """The ranks of all replicas, if these divide the experts; else None."""

    def shard(self, spec: ModelSpec) -> ModelShard:
        """Return this rank's part of the model."""
        pipeline = self.pipeline
        return ModelShard.from_stage(
            spec,
            pipeline.stage,
            pipeline.num_stages,
            self.tensor_parallel,
            has_whole_experts=self.has_whole_experts,
            expert_group=self.expert_group,
        )


def join_replica(
    address: str,
    rank: int,
    parallel: ParallelConfig,
    device: torch.device | HostDevice,
    *,
    core_index: int = 0,
    is_batch_invariant: bool = False,
) -> ParallelState:
    """Connect to the other workers of the replica at `address`, and return this worker's position.

    If replicas divide the experts, the workers of all replicas connect to each other there. `address` is any
    `init_method` of torch.distributed: a file that all ranks see, tcp://host:port, or env://. It must not contain
    anything from an earlier start of the replica.

    Raises:
        RunDirectoryError: The file cannot be written.
    """
    if parallel.workers_per_core == 1 and not parallel.divides_experts_among_replicas:
        return ParallelState()
    size = parallel.tensor_parallel_size
    num_ranks, global_rank = parallel.workers_per_core, rank
    if parallel.divides_experts_among_replicas:
        num_ranks, global_rank = parallel.num_workers, core_index * num_ranks + rank
    if address.startswith("file://") and sys.platform == "linux":
        # All ranks are on one machine, so accept no connections from other machines.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    on_cuda = device.type == "cuda"
    with _explaining_full_disk(address):
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            init_method=address,
            rank=global_rank,
            world_size=num_ranks,
            device_id=torch_device(device) if on_cuda else None,
            timeout=TIMEOUT,
        )
        group = dist.new_subgroups(size, timeout=TIMEOUT)[0] if size > 1 else None
        num_stages = parallel.pipeline_parallel_size
        links: list[dist.ProcessGroup | None] = [None]
        token_group = None
        if num_stages > 1:
            # A middle stage receives through one group and sends through another.
            links = [dist.new_group(timeout=TIMEOUT) for _ in range(min(2, num_stages - 1))]
            token_group = dist.new_group(timeout=TIMEOUT)
        expert_group = None
        if parallel.divides_experts_among_replicas:
            control = dist.new_group(backend="gloo", timeout=TIMEOUT)
            world = dist.group.WORLD
            assert world is not None
            expert_group = ExpertGroup(global_rank, num_ranks, size, world, control)
    stage, place = divmod(rank, size)
    return ParallelState(
        TensorParallel(place, size, group, sums_in_rank_order=is_batch_invariant or not on_cuda),
        Pipeline(stage, num_stages, size, global_rank, links, token_group),
        is_output_rank=rank == parallel.output_rank,
        has_whole_experts=parallel.enable_expert_parallel,
        expert_group=expert_group,
    )


@contextmanager
def _explaining_full_disk(address: str) -> Iterator[None]:
    """Raise RunDirectoryError if the disk is too full for the file that torch writes."""
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
    if is_torch_loaded() and dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def explaining_lost_workers() -> Iterator[None]:
    """Raise PeerLostError if the connection to another worker is lost."""
    try:
        yield
    except RuntimeError as error:
        if not is_torch_loaded():
            raise
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        # Omit the other lines, which are a stack trace inside torch.
        reason = str(error).partition("\n")[0]
        raise PeerLostError(
            f"lost the connection to another worker; see that worker's messages for the cause ({reason})"
        ) from error
