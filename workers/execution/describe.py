"""A program that prints the hardware that this machine can compute with, as JSON, for `engine doctor`."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

import torch

from ...protocol.errors import EngineError
from ...protocol.machine.memory import available_bytes
from ..device.device import usable_cores

PROBE_BYTES: Final = 256 << 20
"""Number of bytes that the bandwidth probe reads, more than any CPU cache holds."""
PROBE_S: Final = 0.6


def describe_machine() -> dict[str, Any]:
    """Return the processors, the state of the native kernels, the GPUs and the memory bandwidths.

    Returns:
        `cores`, `torch`, `instruction_set` (None if the native library cannot be used, for the reason `native_error`),
            `bandwidth` of the CPU, and `gpus` with `name`, `total_bytes`, `free_bytes` and `bandwidth`. Bandwidths are
            in bytes per second.
    """
    cores = usable_cores()
    found: dict[str, Any] = {
        "cores": cores,
        "torch": str(torch.__version__),
        "instruction_set": None,
        "native_error": None,
        "gpus": [],
    }
    try:
        from ..cpu.library import instruction_set

        found["instruction_set"] = instruction_set()
    except (EngineError, OSError) as error:
        found["native_error"] = str(error)
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            bandwidth = measure_bandwidth(torch.device("cuda", index))
            found["gpus"].append(
                {"name": name, "total_bytes": total, "free_bytes": free, "bandwidth": bandwidth}
            )
    torch.set_num_threads(cores)
    found["bandwidth"] = measure_bandwidth(torch.device("cpu"))
    return found


def measure_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a device reads from its memory, in the best of a few passes.

    On a CPU, the threads of torch read.
    """
    is_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if is_gpu else available_bytes()
    data = torch.ones(min(PROBE_BYTES, free // 4) // 4, dtype=torch.float32, device=device)
    best = 0.0
    deadline = time.perf_counter() + PROBE_S
    while not best or time.perf_counter() < deadline:
        begin = time.perf_counter()
        # Reading the sum back waits until the GPU has finished.
        data.sum().item()
        best = max(best, data.nbytes / (time.perf_counter() - begin))
    return best


def main() -> int:
    """Print the description. Return 0."""
    print(json.dumps(describe_machine()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
