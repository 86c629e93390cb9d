"""CUDA graphs on a CPU: operations are recorded on a tape with their tensors, and repeated.

Like a graph, a replay uses the memory of the recording and the Python numbers of that time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        assert func is not torch.ops.aten._local_scalar_dense.default, "a graph cannot wait"
        self.operations.append((func, args, kwargs, result))
        return result

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, recorded in self.operations:
            for old, new in zip(
                tree_leaves(recorded), tree_leaves(func(*args, **kwargs)), strict=True
            ):
                # Views and in-place results already exist.
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapedGraphs:
    """A `GraphRecorder` that records the operations of a step in Python and repeats them."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0
        self._tape: _Tape | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        yield

    def begin(self) -> None:
        assert self._tape is None
        self._tape = _Tape()
        self._tape.__enter__()

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def drop_graphs(self) -> None:
        """Do nothing, because a tape keeps no other memory."""

    def abandon(self) -> None:
        if self._tape is not None:
            self.end()

    def end(self) -> Any:
        tape, self._tape = self._tape, None
        assert tape is not None
        tape.__exit__(None, None, None)
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            tape.replay()

        return replay
