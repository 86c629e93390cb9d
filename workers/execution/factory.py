"""Create the runner for a worker's device."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from ...protocol.checkpoint.pooling.foreign_encoders import read_foreign_encoder
from ...protocol.config import (
    CPUBackend,
    Device,
    EngineConfig,
    LoadFormat,
    ModelImpl,
    ParallelConfig,
)
from ...protocol.errors import ConfigError
from ...protocol.file_identity import verify_files
from ...protocol.worker_messages import WorkerMemory
from ..device import lazy_torch

if TYPE_CHECKING:
    import torch

    from ...protocol.checkpoint.config_fields import ConfigFields
    from ...protocol.checkpoint.pooling.foreign_encoders import ForeignEncoder
    from ..device.dtypes import HostDevice
    from ..loaders import Checkpoint
    from ..loaders.stored.packed_file import PackedFile
    from .inputs.encoder_runner import EncoderRunner, RequestEncoder
    from .model_runner import ModelRunner
    from .null_runner import NullRunner

logger = logging.getLogger(__name__)

Runner: TypeAlias = "ModelRunner | EncoderRunner | NullRunner"
"""Executes steps. Call `allocate_kv_cache` and `warm_up` before the first `execute`."""


@contextmanager
def open_runner(
    config: EngineConfig, core_index: int, rank: int, on_progress: Callable[[int, int], None]
) -> Iterator[tuple[Runner, WorkerMemory]]:
    """Load the model for `--device`. Yield its runner, and the number of KV-cache blocks for which memory is left.

    Raises:
        ConfigError: The device does not exist or is too small.
        EngineError: Another worker is lost.
    """
    if config.device.device is Device.NULL:
        from .null_runner import NullRunner, count_request_blocks

        yield NullRunner(config), WorkerMemory(rank, count_request_blocks(config))
        return
    foreign = read_foreign_encoder(config.model)
    is_without_torch = foreign is None and _starts_without_torch(config)
    if is_without_torch:
        lazy_torch.install()
    else:
        lazy_torch.discard_preloaded()
    # Importing torch takes a second and should not delay the first report. The null device does not need it.
    from ..device.device import count_threads, open_device
    from ..device.dtypes import HostDevice
    from ..device.errors import explaining_device_errors
    from ..device.memory import count_host_blocks, count_kv_blocks
    from ..loaders import DummyCheckpoint, open_checkpoint
    from .model_runner import ModelRunner
    from .parallel_state import explaining_lost_workers, join_replica, leave_replica

    with explaining_lost_workers(), explaining_device_errors("at the start"):
        workers_per_core = config.parallel.workers_per_core
        device: torch.device | HostDevice = HostDevice()
        if not is_without_torch:
            device = open_device(config.device, _local_rank(config.parallel, core_index, rank))
        address = config.rendezvous_address(core_index)
        parallel = join_replica(
            address,
            rank,
            config.parallel,
            device,
            core_index=core_index,
            is_batch_invariant=config.device.batch_invariant,
        )
        is_dummy = config.model.load_format is LoadFormat.DUMMY
        open_weights = DummyCheckpoint if is_dummy else open_checkpoint
        verify_files(config.model.weight_files)
        encoder = _open_encoder(config, device, foreign, open_weights)
        if encoder is not None:
            from .inputs.encoder_runner import EncoderRunner
            from .null_runner import count_request_blocks

            verify_files(config.model.weight_files)
            num_cores = count_threads(config) if device.type == "cpu" else 1
            memory = WorkerMemory(rank, count_request_blocks(config), num_cores=num_cores)
            yield EncoderRunner(encoder), memory
            leave_replica()
            return
        checkpoint = open_weights(config.model.path)
        packed = _find_packed_file(config, core_index, rank) if device.type == "cpu" else None
        runner = ModelRunner(
            config,
            device,
            checkpoint,
            on_progress,
            parallel,
            core_index=core_index,
            rank=rank,
            packed=packed,
        )
        # Loading takes up to minutes, in which the files may have changed.
        verify_files(config.model.weight_files)
        if workers_per_core > 1 or parallel.expert_group is not None:
            logger.info("read %.1f MB of the model's weights", checkpoint.bytes_read / 1e6)
        # Otherwise the memory map of the checkpoint would count as memory of this process.
        del checkpoint
        groups, block_bytes = runner.kv_cache_groups, runner.block_bytes
        profile = runner.profile_memory(config.cache.gpu_memory_utilization)
        if profile is not None:
            logger.info("GPU memory, %s", profile)
        # The pages of a mapped file count as free memory, but will be copied.
        mapped_bytes = 0 if packed is None else packed.mapped_bytes
        num_blocks = count_kv_blocks(
            config, block_bytes, groups, profile, reserved_bytes=mapped_bytes
        )
        num_host_blocks = count_host_blocks(
            config, block_bytes, _num_local_workers(config.parallel)
        )
        num_cores = count_threads(config) if device.type == "cpu" else 1
        yield runner, WorkerMemory(rank, num_blocks, groups, num_host_blocks, num_cores)
        leave_replica()


def _open_encoder(
    config: EngineConfig,
    device: torch.device | HostDevice,
    foreign: tuple[ConfigFields, ForeignEncoder] | None,
    open_weights: Callable[[str], Checkpoint],
) -> RequestEncoder | None:
    """Load a model that is an encoder alone. Return None for other models.

    Raises:
        ConfigError: An option needs Engine's own layers, or transformers is missing.
    """
    audio = config.model.audio
    if foreign is None and (audio is None or not audio.writes_tokens):
        return None
    if config.model.enable_lora:
        raise ConfigError("--enable-lora needs Engine's own layers; remove the flag")
    if foreign is not None:
        from .inputs.text_encoder import TextEncoder

        return TextEncoder(config, device, *foreign)
    from .inputs.clip_encoder import ClipEncoder

    return ClipEncoder(config, device, open_weights(config.model.path))


def _find_packed_file(config: EngineConfig, core_index: int, rank: int) -> PackedFile | None:
    """Return the file of the worker's packed weights, which may not exist; None if they are not to be kept.

    Weights that replaced those of the start are not kept: a trainer may send others every minute.
    """
    model, parallel, device = config.model, config.parallel, config.device
    if not device.packed_weights_path or model.load_format is LoadFormat.DUMMY or model.weights_id:
        return None
    from ..cpu.library import LIBRARY_PATH, NotSupportedNatively, instruction_set
    from ..kv_transfer.fingerprint import hash_config_files
    from ..loaders.stored.packed_file import PackedFile

    try:
        kernels = instruction_set()
    except NotSupportedNatively:
        return None
    library = LIBRARY_PATH.stat()
    facts = (
        [
            (file.size, file.modified_ns, file.head_sha256, file.content)
            for file in model.weight_files
        ],
        hash_config_files(model),
        (model.dtype, model.quantization, model.model_impl),
        (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, rank),
        (parallel.data_parallel_size, core_index)
        if parallel.divides_experts_among_replicas
        else (),
        (kernels, library.st_size, library.st_mtime_ns),
    )
    key = hashlib.sha256(msgspec.msgpack.encode(facts)).digest()
    limit_bytes = int(device.packed_weights_gib * (1 << 30))
    return PackedFile(Path(device.packed_weights_path), key, limit_bytes)


def _starts_without_torch(config: EngineConfig) -> bool:
    """Return whether the worker should try to compute the model without importing torch, by a native program.

    If the native program turns out not to support the model, torch is imported then.
    """
    parallel, device = config.parallel, config.device
    if parallel.workers_per_core > 1 or parallel.divides_experts_among_replicas:
        return False
    if device.cpu_backend is CPUBackend.TORCH or config.model.model_impl is ModelImpl.TRANSFORMERS:
        return False
    if device.device is Device.AUTO:
        return not _has_gpu_driver()
    return device.device is Device.CPU


def _has_gpu_driver() -> bool:
    """Return whether the library of a GPU driver is installed. Without it, torch cannot find a GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _local_rank(parallel: ParallelConfig, core_index: int, rank: int) -> int:
    """Return a worker's index among the workers of its machine."""
    if parallel.is_external:
        return int(os.environ["LOCAL_RANK"])
    return (core_index * parallel.workers_per_core + rank) % parallel.workers_per_node


def _num_local_workers(parallel: ParallelConfig) -> int:
    """Return the number of workers of all replicas on this machine."""
    if parallel.is_external:
        return int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return parallel.workers_per_node
