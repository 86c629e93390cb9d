"""An accelerator simulated in host memory: graphs are tapes, and results arrive one poll later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from support.gpu.taped_graphs import TapedGraphs


class LateDownload:
    def __init__(self) -> None:
        self._looks = 0
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        source = tensor.clone()
        target = torch.full_like(source, 99)
        self._copies.append((target, source))
        return target

    def has_arrived(self) -> bool:
        self._looks += 1
        if self._looks > 1:
            self.wait()
        return self._looks > 1

    @torch.inference_mode()
    def wait(self) -> None:
        for target, source in self._copies:
            target.copy_(source)


class HostAccelerator:
    """`total` bytes, of which other processes have `others`.

    A tape counts as `graph_bytes` of them, the first one as ten times that.
    """

    def __init__(self, total: int = 1 << 30, others: int = 0, graph_bytes: int = 0) -> None:
        self.graphs = TapedGraphs()
        self._total = total
        self._others = others
        self._graph_bytes = graph_bytes
        self.allocated = 0
        self.peak = 0

    def total_memory(self) -> int:
        return self._total

    def used_memory(self) -> int:
        num_graphs = self.graphs.num_recorded + 9 * bool(self.graphs.num_recorded)
        return self._others + self.reserved_memory() + num_graphs * self._graph_bytes

    def reserved_memory(self) -> int:
        return self.allocated

    def allocated_memory(self) -> int:
        return self.allocated

    def peak_memory(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.peak = self.allocated

    def release_memory(self) -> None:
        """Do nothing, because this device caches no memory."""

    def graph_recorder(self) -> TapedGraphs:
        return self.graphs

    @contextmanager
    def download(self) -> Iterator[LateDownload]:
        yield LateDownload()
