"""The memory that tensors take, counted as a GPU's allocator would."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of live tensors on `device` that operations return in the context."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._sizes: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.device == self._device:
                storage = x.untyped_storage()
                self._sizes[StorageWeakRef(storage)] = storage.nbytes()
        self.peak = max(self.peak, self.now)
        return result

    @property
    def now(self) -> int:
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        return sum(self._sizes.values())
