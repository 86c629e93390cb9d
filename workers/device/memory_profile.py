"""Measure the device memory that a worker needs in addition to the KV cache, before the cache is allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from .accelerator import Accelerator

GIB = 1024**3

Run = Callable[[], object]


class MemoryProfile(msgspec.Struct, frozen=True):
    """The memory of a device, in bytes.

    `non_torch` is used by the driver's context, NCCL's buffers and other processes. `staging` is needed for copies to
    and from the CPU KV offload.
    """

    total: int
    utilization: float
    non_torch: int
    weights: int
    activations: int
    graphs: int
    staging: int = 0

    @property
    def taken(self) -> int:
        """Bytes that are not available for the KV cache."""
        return self.non_torch + self.weights + self.activations + self.graphs + self.staging

    @property
    def kv_cache(self) -> int:
        """Number of bytes that are left for the KV cache within the usable share of the memory, at least 0."""
        return max(0, int(self.total * self.utilization) - self.taken)

    def utilization_for(self, kv_cache: int) -> float | None:
        """Return the smallest `--gpu-memory-utilization`, in hundredths, for a KV cache of this size, or None."""
        hundredths = -(-100 * (self.taken + kv_cache) // self.total)
        return hundredths / 100 if hundredths <= 100 else None

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "activations": self.activations,
            "graphs": self.graphs,
            "the driver, NCCL and others": self.non_torch,
        }
        if self.staging:
            parts["copies of CPU KV offload"] = self.staging
        parts["left for the KV cache"] = self.kv_cache
        listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
        return f"of {self.total / GIB:.2f} GiB x {self.utilization:g}: {listed}"


def profile_memory(
    accelerator: Accelerator,
    utilization: float,
    run_largest_steps: Run,
    captures: Sequence[Sequence[Run]],
    staging: int = 0,
) -> MemoryProfile:
    """Measure the memory of a loaded model.

    The two largest graphs of each kind are captured to estimate the memory of all graphs. The first one allocates the
    memory that all graphs of its kind share. Each additional graph takes little more than its list of kernels.
    """
    accelerator.release_memory()
    weights = accelerator.allocated_memory()
    accelerator.reset_peak()
    run_largest_steps()
    activations = accelerator.peak_memory() - weights
    accelerator.release_memory()
    non_torch = max(0, accelerator.used_memory() - accelerator.reserved_memory())
    graphs = 0
    for kind in captures:
        first, *others = (_growth(accelerator, capture) for capture in kind[:2])
        graphs += first + (len(kind) - 1) * sum(others)
    return MemoryProfile(
        accelerator.total_memory(), utilization, non_torch, weights, activations, graphs, staging
    )


def _growth(accelerator: Accelerator, capture: Run) -> int:
    before = accelerator.used_memory()
    capture()
    accelerator.release_memory()
    return max(0, accelerator.used_memory() - before)
