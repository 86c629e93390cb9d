"""Find the GPUs of this machine without loading torch."""

import itertools
import os
from pathlib import Path

from ....protocol.config import Device

DEVICE_FILES = Path("/dev")


def has_gpu(device: Device) -> bool:
    """Return whether the workers are expected to run on a GPU.

    This looks for the driver's files, because torch is not loaded in this process.
    """
    if device is Device.AUTO:
        return _visible_gpus() != [] and (DEVICE_FILES / "nvidiactl").exists()
    return device is Device.CUDA


def count_gpus() -> int:
    """Return the number of GPUs that a process on this machine may use; 0 if that is unknown."""
    present = sum(name.name[6:].isdigit() for name in DEVICE_FILES.glob("nvidia?*"))
    visible = _visible_gpus()
    return present if visible is None else min(present, len(visible))


def _visible_gpus() -> list[str] | None:
    """Return the devices in CUDA_VISIBLE_DEVICES before the first invalid one; None if the variable is not set."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return None
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names.split(",")))
