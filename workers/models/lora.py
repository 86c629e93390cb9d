"""Adds LoRA adapters to the products of a decoder. The rows of a step may use different adapters.

Shapes: T tokens of a step, R rank, I input features, O output features.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ...protocol.arrays import Int32Array
from ...protocol.errors import CheckpointError
from ..layers.layers import LayerKernels, Linear
from ..loaders.peft_adapter import LowRank, PEFTAdapter
from ..parallel.shard import ModelShard

_BASE: Final = -1
_LAYER: Final = re.compile(r"layers\.(\d+)\..+")


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Some of the `total` rows of the module `name`, which `select` takes from all of them."""

    name: str
    total: int
    select: Callable[[Tensor], Tensor]


class LoraAdapters:
    """The adapters of a model, and which of them each slot uses.

    Args:
        paths: The directory of each adapter by its name.
        max_rank: The highest rank of an adapter.
        num_slots: The number of requests that may run at once.
    """

    def __init__(self, paths: dict[str, str], max_rank: int, num_slots: int) -> None:
        self._adapters = [PEFTAdapter(Path(path), max_rank) for path in paths.values()]
        self.num_adapters = len(paths)
        self.number_by_slot = np.full(num_slots, _BASE, np.int32)
        """The number of each slot's adapter, -1 for the base model."""
        self.number_T = np.empty(0, np.int32)
        """The number of the adapter of each token of the step."""
        self._number_by_name = {name: number for number, name in enumerate(paths)}
        self._modules: list[dict[str, str]] = []
        self._unread: list[set[str]] = []
        self._rows: list[tuple[int, Tensor]] | None = None

    def prepare(
        self,
        tensor_names: Sequence[tuple[str, str]],
        shard: ModelShard,
        kernels: LayerKernels | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Find the modules of the shard's layers. `tensor_names` is that of `ModelSpec`.

        `adapt` multiplies by the factors with `kernels`, in `dtype`.
        """
        self._kernels, self._dtype = kernels or LayerKernels(), dtype
        for adapter in self._adapters:
            modules = {}
            for module in adapter.modules():
                name = f"{module}.weight"
                for pattern, replacement in tensor_names:
                    name = re.sub(pattern, replacement, name)
                layer = _LAYER.search(name.removesuffix(".weight"))
                if layer is None or int(layer[1]) >= shard.num_layers:
                    raise adapter.error(
                        f"the module {module} cannot be adapted; only those in the model's {shard.num_layers} "
                        "layers can"
                    )
                if int(layer[1]) in shard.layers:
                    modules[layer[0]] = module
            self._modules.append(modules)
            self._unread.append(set(modules))

    def adapt(
        self,
        linear: Linear,
        rows: Sequence[AdaptedRows],
        num_columns: int,
        columns: range | None = None,
    ) -> Linear:
        """Return `linear`, which multiplies by these rows, or by a part of their columns, with the adapters added."""
        parts = [self.changes(each, num_columns, columns) for each in rows]
        heights = [each.select(torch.empty(each.total, 0)).shape[0] for each in rows]
        changes: dict[int, tuple[Linear, Linear]] = {}
        for number in {number for part in parts for number in part}:
            found = [part.get(number) for part in parts]
            # A module whose rows are divided has its first factor once for each part of them.
            downs = [low.down_RI for low in found if low is not None]
            up_OR = torch.zeros(sum(heights), sum(map(len, downs)))
            row = column = 0
            for low, height in zip(found, heights, strict=True):
                if low is not None:
                    rank = low.up_OR.shape[1]
                    up_OR[row : row + height, column : column + rank] = low.up_OR
                    column += rank
                row += height
            changes[number] = (
                self._kernels.linear(torch.cat(downs).to(self._dtype)),
                self._kernels.linear(up_OR.to(self._dtype)),
            )
        if not changes:
            return linear

        def forward(x_TI: Tensor) -> Tensor:
            y_TO = linear(x_TI)
            for number, rows_T in self._rows_by_adapter():
                if (change := changes.get(number)) is not None:
                    down, up = change
                    y_TO.index_add_(0, rows_T, up(down(x_TI[rows_T])))
            return y_TO

        return forward

    def changes(
        self, rows: AdaptedRows, num_columns: int, columns: range | None = None
    ) -> dict[int, LowRank]:
        """Return what each adapter changes of these rows, or of a part of their columns, by the adapter's number."""
        changes = {}
        for number, modules in enumerate(self._modules):
            if (module := modules.get(rows.name)) is not None:
                low = self._read(number, module, rows, num_columns)
                down_RI = low.down_RI
                if columns is not None:
                    down_RI = down_RI[:, columns.start : columns.stop]
                changes[number] = LowRank(down_RI.contiguous(), rows.select(low.up_OR))
        return changes

    def _read(self, number: int, module: str, rows: AdaptedRows, num_columns: int) -> LowRank:
        adapter = self._adapters[number]
        self._unread[number].discard(rows.name)
        low = adapter.read(module)
        found = [len(low.up_OR), low.down_RI.shape[1]]
        if found != [rows.total, num_columns]:
            raise adapter.error(
                f"{module} is for a matrix of shape {found}, but the model's has {[rows.total, num_columns]}; "
                "the adapter is for another model"
            )
        return low

    def error(self, number: int, problem: str) -> CheckpointError:
        """Return an error about an adapter, before `finish`."""
        return self._adapters[number].error(problem)

    def finish(self) -> None:
        """Raise an error if an adapter changes a module that cannot be adapted."""
        for adapter, modules, unread in zip(
            self._adapters, self._modules, self._unread, strict=True
        ):
            if unread:
                raise adapter.error(
                    f"the module {modules[min(unread)]} of this model cannot be adapted; only projections of attention "
                    "and dense MLPs can"
                )
        self._adapters = []

    def set_slot(self, slot: int, name: str) -> None:
        """Use an adapter for a slot, or the base model if `name` is ""."""
        self.number_by_slot[slot] = self._number_by_name[name] if name else _BASE

    def begin_step(self, slots_T: Int32Array) -> None:
        """Use the adapters of the slots of a step's tokens."""
        self.number_T = self.number_by_slot[slots_T]
        self._rows = None

    def _rows_by_adapter(self) -> list[tuple[int, Tensor]]:
        """Return the number of each adapter of the step, and its rows."""
        if self._rows is None:
            self._rows = [
                (int(number), torch.from_numpy(np.flatnonzero(self.number_T == number)))
                for number in np.unique(self.number_T)
                if number != _BASE
            ]
        return self._rows
