"""Choose the device of a worker, and the number of CPU cores that it may use."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import torch

from ...protocol.config import Device, DeviceConfig, EngineConfig
from ...protocol.errors import ConfigError
from ...protocol.machine.control_groups import CGROUPS, control_groups


def open_device(config: DeviceConfig, local_rank: int = 0) -> torch.device:
    """Return the device for `--device`. Each worker on a machine has its own GPU, chosen by `local_rank`.

    Raises:
        ConfigError: The device does not exist.
    """
    if config.device is Device.CUDA and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: torch finds no CUDA device; use --device cpu or install torch with CUDA"
        )
    if config.device is Device.CPU or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"worker {local_rank} needs its own GPU, but this machine has {torch.cuda.device_count()}; "
            "lower --tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size, or use "
            "--device cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def usable_cores(cgroups: Path = CGROUPS) -> int:
    """Return how many CPU cores this process may use, given its affinity and its container's CPU limit."""
    cores = [os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        cores.append(len(os.sched_getaffinity(0)))
    with suppress(OSError, ValueError):
        cores += map(_cores_of, control_groups("cpu", cgroups))
    return max(1, min(cores))


def count_threads(config: EngineConfig) -> int:
    """Return the number of threads with which a worker on a CPU computes."""
    return config.device.threads or max(1, usable_cores() // config.parallel.num_workers)


def _cores_of(group: Path) -> int:
    if (group / "cpu.max").exists():
        quota, period = (group / "cpu.max").read_text().split()
    elif (group / "cpu.cfs_quota_us").exists():
        quota, period = ((group / f"cpu.cfs_{x}_us").read_text() for x in ("quota", "period"))
    else:
        return sys.maxsize
    return sys.maxsize if quota.strip() in ("max", "-1") else int(quota) // int(period)


def has_float8(device: torch.device) -> bool:
    """Return whether the device computes with float8 (e4m3)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
