"""The workers of one replica as real processes, without a core: each runs the same steps on its part of the model."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from engine.protocol.arrays import float32_view, int32_bytes, int32_view
from engine.protocol.config import (
    CacheConfig,
    CPUBackend,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import NewRequestData, SchedulerOutput
from engine.workers.execution.model_runner import ModelRunner
from engine.workers.execution.parallel_state import join_replica, leave_replica
from engine.workers.kv_transfer.block_regions import Region
from engine.workers.loaders import open_checkpoint
from support.gpu.host_accelerator import HostAccelerator
from support.workers.worker_steps import output_of

BLOCK_SIZE = 16
LARGER_BLOCKS = {"rwkv6": 128, "rwkv7": 128}
"""The block size of model types whose states need larger blocks."""
MAX_MODEL_LEN = 128
BLOCKS_PER_ROW = MAX_MODEL_LEN // BLOCK_SIZE
NUM_SLOTS = 4
NUM_TOKENS = 33
"""Tokens that the workload samples."""

CPU = torch.device("cpu")
TIMEOUT_S = 120

GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(temperature=0.9, seed=7)
PENALIZED = SamplingParams(temperature=0, repetition_penalty=1.3)
SCORED = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    seed=11,
    logprobs=2,
    prompt_logprobs=2,
    logprob_token_ids=(9, 3),
    prompt_logprob_token_ids=(5,),
)


@dataclass(frozen=True)
class Served:
    """A checkpoint, and its execution by the host or as by a GPU, with graphs if ranks share no layer."""

    path: Path
    backend: CPUBackend = CPUBackend.TORCH
    is_accelerated: bool = False
    speculative: SpeculativeConfig | None = None


@dataclass(frozen=True)
class RankResult:
    """Results of one rank for one checkpoint. Only the last stage has tokens, log-probabilities and drafts."""

    tokens: list[list[int]]
    logprobs: list[float]
    bytes_read: int
    block_bytes: int
    drafts: list[list[int]]
    blocks: list[list[bytes]]
    """The parts of each block after the last step."""
    groups: list[int]
    """The KV-cache group of each block that the workload uses."""
    regions: list[Region]


def run_replica(
    directory: Path, parallel: ParallelConfig, served: list[Served]
) -> list[list[RankResult]]:
    """Run a replica, and return the results of each rank for each checkpoint."""
    return _run_ranks(_rank, directory, parallel, served)


def timeouts(directory: Path, parallel: ParallelConfig) -> list[list[timedelta]]:
    """Return how long each rank waits for all others, and for those that share its layers."""
    return _run_ranks(_timeouts, directory, parallel)


def _run_ranks(
    run: Callable[..., None], directory: Path, parallel: ParallelConfig, *arguments: Any
) -> list[list[Any]]:
    context: Any = multiprocessing.get_context("forkserver")
    # Importing torch takes most of a rank's time.
    context.set_forkserver_preload(["engine.workers.execution.model_runner"])
    address = f"file://{directory}/rendezvous"
    ranks = []
    for rank in range(parallel.workers_per_core):
        ours, theirs = context.Pipe()
        process = context.Process(target=run, args=(theirs, address, rank, parallel, *arguments))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    results = []
    try:
        for _, pipe in ranks:
            assert pipe.poll(TIMEOUT_S), "a rank hangs"
            result = pipe.recv()
            assert not isinstance(result, str), result
            results.append(result)
        # If a rank exits while another one is still connecting to it, that connection is closed.
        for _, pipe in ranks:
            pipe.send("leave")
        for process, _ in ranks:
            process.join(TIMEOUT_S)
            assert process.exitcode == 0
    finally:
        for process, _ in ranks:
            process.kill()
    return results


def _timeouts(pipe: Any, address: str, rank: int, parallel: ParallelConfig) -> None:
    state = join_replica(address, rank, parallel, CPU)
    groups = (dist.group.WORLD, state.tensor_parallel.group)
    pipe.send([group._get_backend(CPU).options._timeout for group in groups])
    pipe.recv()
    leave_replica()


def _rank(
    pipe: Any, address: str, rank: int, parallel: ParallelConfig, served: list[Served]
) -> None:
    torch.set_num_threads(1)
    try:
        state = join_replica(address, rank, parallel, CPU)
        results = []
        for each in served:
            checkpoint = open_checkpoint(each.path)
            of_text = checkpoint.config.get("text_config", checkpoint.config)
            vocab_size = of_text["vocab_size"]
            block_size = LARGER_BLOCKS.get(of_text.get("model_type"), BLOCK_SIZE)
            config = EngineConfig(
                "/run",
                1,
                ModelConfig(
                    "m", str(each.path), "", ("m",), "", vocab_size, MAX_MODEL_LEN, (1,), "float32"
                ),
                CacheConfig(block_size=block_size),
                SchedulerConfig(max_num_seqs=NUM_SLOTS, speculative=each.speculative),
                parallel,
                DeviceConfig(
                    threads=1,
                    cpu_backend=each.backend,
                    # A tape cannot wait for messages of other ranks.
                    enforce_eager=parallel.tensor_parallel_size > 1,
                    max_cudagraph_capture_size=16,
                ),
            )
            accelerator = HostAccelerator() if each.is_accelerated else None
            runner = ModelRunner(
                config, CPU, checkpoint, lambda done, total: None, state, accelerator
            )
            runner.profile_memory(0.9)
            num_groups = len(runner.kv_cache_groups)
            runner.allocate_kv_cache(1 + NUM_SLOTS * num_groups * BLOCKS_PER_ROW)
            runner.warm_up()
            tokens, logprobs, drafts = [], [], []
            for step in workload(vocab_size, num_groups, MAX_MODEL_LEN // block_size):
                output = output_of(runner.execute(step, lambda step: None))
                tokens.append(int32_view(output.sampled_token_ids).tolist())
                if output.drafts is not None:
                    drafts.append(int32_view(output.drafts.token_ids).tolist())
                for row in (*output.prompt_logprobs, *output.logprobs):
                    logprobs += float32_view(row.logprobs).tolist()
            runner.close()
            memory = runner.kv_cache.memory
            assert memory is not None
            blocks_per_row = MAX_MODEL_LEN // block_size
            groups = [0, *np.repeat(range(num_groups), blocks_per_row).tolist() * NUM_SLOTS]
            results.append(
                RankResult(
                    tokens,
                    logprobs,
                    checkpoint.bytes_read,
                    runner.block_bytes,
                    drafts,
                    [[bytes(x) for x in memory.views(block)] for block in range(len(groups))],
                    groups,
                    runner.kv_cache.regions(),
                )
            )
        pipe.send(results)
        pipe.recv()
        leave_replica()
    except BaseException:
        pipe.send(traceback.format_exc())
        raise


def workload(
    vocab_size: int, num_groups: int, blocks_per_row: int = BLOCKS_PER_ROW
) -> list[SchedulerOutput]:
    """Run whole and chunked prompts, concurrent and alternating decodes, a reused slot, and an empty step."""
    rng = np.random.default_rng(3)

    def new(slot: int, length: int, params: SamplingParams) -> NewRequestData:
        first_row = slot * num_groups * blocks_per_row
        blocks = 1 + first_row + np.arange(num_groups * blocks_per_row).reshape(num_groups, -1)
        return NewRequestData(
            slot=slot,
            request_id=(0, slot),
            token_ids=int32_bytes(rng.integers(4, vocab_size, length)),
            num_prompt_tokens=length,
            num_computed_tokens=0,
            block_ids=tuple(int32_bytes(row) for row in blocks),
            sampling_params=params,
            eos_token_ids=(1,),
        )

    def step(
        slots: list[int] | None = None,
        chunks: list[tuple[int, int]] | None = None,
        new: list[NewRequestData] | None = None,
        removed: list[int] | None = None,
    ) -> None:
        output = SchedulerOutput(
            len(steps) + 1,
            removed_slots=int32_bytes(removed or []),
            new_requests=new or [],
            slots=None if slots is None else int32_bytes(slots),
            chunks=int32_bytes(chunks or []),
        )
        steps.append(output)

    steps: list[SchedulerOutput] = []
    step([0, 1], [(0, 20), (1, 9)], [new(0, 20, GREEDY), new(1, 9, SEEDED)])
    step()
    step([0, 1, 2], [(2, 12)], [new(2, 30, SCORED)])
    step(None, [(2, 18)])
    for _ in range(2):
        step()
    # The token of the slot's last step is still in flight when the slot gets another request.
    step([0, 1, 2], [(0, 7)], [new(0, 7, PENALIZED)], removed=[0])
    for _ in range(3):
        step()
    for _ in range(2):
        step([1])
        step([0, 2])
    step([])
    return steps
