"""Settings and a resolved model become the configuration that every process reads."""

from __future__ import annotations

import itertools
import os
import socket
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from ..protocol.cluster_key import load_cluster_key
from ..protocol.config import (
    FIRST_EPOCH,
    CacheConfig,
    CPUBackend,
    Device,
    DeviceConfig,
    EngineConfig,
    ExecutorBackend,
    FrontendConfig,
    ParallelConfig,
    PreemptionMode,
    PrefixHash,
    RecoveryConfig,
    SchedulerConfig,
    SchedulingPolicy,
    SpeculativeConfig,
)
from ..protocol.errors import ConfigError
from ..protocol.model_dimensions import check_parallel
from .arguments import Settings
from .flag_values import PerReplica
from .model_options import ResolvedModel

DEVICE_FILES = Path("/dev")
MAX_PORT = 65535


def make_engine_config(settings: Settings, model: ResolvedModel, run_dir: str) -> EngineConfig:
    """Raises ConfigError, naming both flags, if two settings contradict each other."""
    device = make_device_config(settings)
    parallel = _as_first_node(make_parallel_config(settings))
    cache = _make_cache_config(settings, parallel)
    _check_prefix_hash(cache)
    scheduler = _make_scheduler_config(
        settings, device.device, model.config.max_model_len, parallel.pipeline_parallel_size
    )
    _check_host_tier(cache, scheduler)
    if model.dimensions is not None:
        check_parallel(model.dimensions, parallel)
    _check_gpus(device.device, parallel)
    return EngineConfig(
        run_dir=run_dir,
        epoch=FIRST_EPOCH,
        model=model.config,
        cache=cache,
        scheduler=scheduler,
        parallel=parallel,
        device=device,
        recovery=RecoveryConfig(**settings["recovery"]),
        frontend=make_frontend_config(settings, model.default_sampling),
    )


def make_device_config(settings: Settings) -> DeviceConfig:
    given = dict(settings["device"])
    given["device"] = Device(given.get("device", Device.AUTO))
    given["cpu_backend"] = CPUBackend(given.get("cpu_backend", CPUBackend.AUTO))
    return DeviceConfig(**given)


def make_parallel_config(settings: Settings) -> ParallelConfig:
    """Raises ConfigError if several machines cannot know or reach each other."""
    given = dict(settings["parallel"])
    backend = given.get("distributed_executor_backend", ExecutorBackend.MP)
    given["distributed_executor_backend"] = ExecutorBackend(backend)
    parallel = ParallelConfig(**given)
    if not parallel.is_distributed:
        return parallel
    if parallel.is_external and parallel.nnodes > 1:
        raise ConfigError(
            f"--nnodes {parallel.nnodes} is for the launcher, not for engine serve, with "
            "--distributed-executor-backend external_launcher; leave it out"
        )
    if parallel.cluster_key is None:
        raise ConfigError(
            "several machines need --cluster-key FILE; make the file by engine keygen, and copy it to each of them"
        )
    load_cluster_key(parallel.cluster_key)
    last_port = parallel.master_port + 2 * parallel.data_parallel_size
    if last_port > MAX_PORT:
        raise ConfigError(
            f"--master-port {parallel.master_port} must be at most {MAX_PORT - 2 * parallel.data_parallel_size}: "
            f"{2 * parallel.data_parallel_size} ports after it are used as well"
        )
    return msgspec.structs.replace(parallel, cluster_key=os.path.abspath(parallel.cluster_key))


def _as_first_node(parallel: ParallelConfig) -> ParallelConfig:
    """With an address that can be listened on."""
    if not parallel.is_distributed:
        return parallel
    if parallel.num_workers % parallel.num_nodes:
        raise ConfigError(
            f"--nnodes {parallel.nnodes} cannot share {parallel.num_workers} workers equally "
            f"(--tensor-parallel-size {parallel.tensor_parallel_size} x --pipeline-parallel-size "
            f"{parallel.pipeline_parallel_size} x --data-parallel-size {parallel.data_parallel_size})"
        )
    return msgspec.structs.replace(parallel, master_addr=_resolve(parallel.master_addr))


def _resolve(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--master-addr {host!r} is not the name of a machine: {error}") from None


def make_frontend_config(
    settings: Settings, default_sampling: dict[str, float | int] | None = None
) -> FrontendConfig:
    return FrontendConfig(**settings["frontend"], default_sampling=default_sampling or {})


def _make_scheduler_config(
    settings: Settings, device: Device, max_model_len: int, num_stages: int
) -> SchedulerConfig:
    given: dict[str, Any] = dict(settings["scheduler"], num_micro_batches=num_stages)
    given["policy"] = SchedulingPolicy(given.get("policy", SchedulingPolicy.FCFS))
    given["speculative"] = _speculation(given, device, num_stages)
    chunked = given.get("enable_chunked_prefill", True)
    limits = _limits(has_gpu(device))
    given.setdefault("max_num_seqs", limits.max_num_seqs)
    needed = max(given["max_num_seqs"], 0 if chunked else max_model_len)
    given.setdefault("max_num_batched_tokens", max(limits.max_num_batched_tokens, needed))
    if "preemption_mode" in given:
        given["preemption_mode"] = PreemptionMode(given["preemption_mode"])
    config = SchedulerConfig(**given)
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} must be at least "
            f"--max-num-seqs, which is {config.max_num_seqs}; raise the one or lower the other"
        )
    if not chunked and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} must be at least --max-model-len, which is "
            f"{max_model_len}, when --no-enable-chunked-prefill is given; raise the one or lower the other"
        )
    return config


def _make_cache_config(settings: Settings, parallel: ParallelConfig) -> CacheConfig:
    given = dict(settings["cache"])
    if isinstance(given.get("host_gib"), PerReplica):
        given["host_gib"] /= parallel.workers_per_core
    return CacheConfig(**given)


def _check_prefix_hash(cache: CacheConfig) -> None:
    if cache.prefix_hash is PrefixHash.XXH3:
        try:
            import_module("xxhash")
        except ImportError as error:
            raise ConfigError(
                "--prefix-hash xxh3 needs the package xxhash; pip install xxhash, or leave the flag out"
            ) from error


def _check_host_tier(cache: CacheConfig, scheduler: SchedulerConfig) -> None:
    if cache.host_gib and not cache.enable_prefix_caching:
        raise ConfigError(
            f"--kv-host-gib {cache.host_gib:g} keeps cached prefixes, which --no-enable-prefix-caching turns off; "
            "leave out one of them"
        )
    if scheduler.preemption_mode is PreemptionMode.SWAP and not cache.host_gib:
        raise ConfigError("--preemption-mode swap needs the memory of --kv-host-gib, which is 0")


def _speculation(
    given: dict[str, Any], device: Device, num_stages: int
) -> SpeculativeConfig | None:
    """As given. By default drafts are on where they are possible: a text without repetitions pays nothing for them."""
    is_possible = num_stages == 1 and not has_gpu(device)
    if "speculative" not in given:
        return SpeculativeConfig(num_speculative_tokens=8) if is_possible else None
    speculative: SpeculativeConfig | None = given["speculative"]
    if speculative is not None and not is_possible:
        raise ConfigError(
            "--speculative-config needs --device cpu and --pipeline-parallel-size 1, which is "
            f"{num_stages} here; leave it out, or change those"
        )
    return speculative


def _limits(on_gpu: bool) -> SchedulerConfig:
    """A step on a CPU takes long in proportion to its tokens, so fewer of them keep latencies low."""
    return (
        SchedulerConfig()
        if on_gpu
        else SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512)
    )


def _check_gpus(device: Device, parallel: ParallelConfig) -> None:
    """Each worker has a GPU of its own."""
    if has_gpu(device) and 0 < (num_gpus := _count_gpus()) < parallel.num_local_workers:
        machines = f" on {parallel.nnodes} machines" if parallel.nnodes > 1 else ""
        raise ConfigError(
            f"--tensor-parallel-size {parallel.tensor_parallel_size} x --pipeline-parallel-size "
            f"{parallel.pipeline_parallel_size} x --data-parallel-size {parallel.data_parallel_size}{machines} needs "
            f"{parallel.num_local_workers} GPUs, one for each worker, and there are {num_gpus}; lower one of them, or "
            "use --device cpu"
        )


def has_gpu(device: Device) -> bool:
    """Whether the workers are expected to run on a GPU. Asks the driver's files, since torch is not loaded here."""
    if device is Device.AUTO:
        return _visible_gpus() != [] and (DEVICE_FILES / "nvidiactl").exists()
    return device is Device.CUDA


def _count_gpus() -> int:
    """The GPUs that a process of this machine may use; 0 if that cannot be told."""
    present = sum(name.name[6:].isdigit() for name in DEVICE_FILES.glob("nvidia?*"))
    visible = _visible_gpus()
    return present if visible is None else min(present, len(visible))


def _visible_gpus() -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES lists, up to the first it hides; None if it does not say."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return None
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names.split(",")))
