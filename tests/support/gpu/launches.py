"""Names of the kernels that a step would launch on a GPU. Steps run on `meta`, where nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
_LAUNCH_NOTHING = frozenset(
    [
        "alias",
        "as_strided",
        "detach",
        "empty",
        "empty_like",
        "empty_strided",
        "expand",
        "flatten",
        "new_empty",
        "permute",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unflatten",
        "unsqueeze",
        "view",
        "_unsafe_view",
    ]
)


class _Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
        if name not in _LAUNCH_NOTHING and any(x.device == META for x in tensors):
            self.names.append(name)
            if name in ("index", "index_put", "index_put_"):
                # Before they are used, indices become 64-bit integers.
                narrow = [x for x in args[1] if x is not None and x.dtype is torch.int32]
                self.names += ["to"] * len(narrow)
        return result


@contextmanager
def launches(monkeypatch: Any) -> Iterator[list[str]]:
    """Record the kernels launched in the context. Triton's kernels are not run."""
    from triton.runtime.jit import KernelInterface

    noted = _Launches()

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: noted.names.append(kernel.fn.__name__)

    monkeypatch.setattr(KernelInterface, "__getitem__", launch)
    with noted:
        yield noted.names
