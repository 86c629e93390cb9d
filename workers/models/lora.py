"""Adds LoRA adapters to the products of a decoder. The rows of a step may use different adapters.

Shapes: T tokens of a step, N adapters, R rank, I input features, O output features.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from ...protocol.arrays import Int32Array
from ...protocol.file_identity import LoraAdapter
from ..layers.layers import LayerKernels
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


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """Rows of a module and the part `columns` of its `num_columns`, None for all: a part of a product."""

    rows: AdaptedRows
    num_columns: int
    columns: range | None = None

    def changed(self, low: LowRank) -> LowRank:
        """Return what the change of the whole module changes here."""
        down_RI = low.down_RI
        if self.columns is not None:
            down_RI = down_RI[:, self.columns.start : self.columns.stop]
        return LowRank(down_RI.contiguous(), self.rows.select(low.up_OR))


class AdaptedProduct(Protocol):
    """A product of several matrices, each of which adapters may change."""

    @property
    def parts(self) -> Sequence[AdaptedMatrix]:
        """The matrices."""

    def pack(self, changes: Sequence[LowRank | None]) -> Any:
        """Return what an adapter changes of each matrix, as `install` takes it.

        This may run in another thread while the product is in use.

        Raises:
            ValueError: A number is not finite, or too large.
        """

    def install(self, number: int, packed: Any) -> None:
        """Give this number to an adapter; if `packed` is None, the adapter leaves the product alone."""


class LoadedAdapter:
    """An adapter with what it changes of each product, in the order of the products."""

    def __init__(self, adapter: LoraAdapter, packed: list[Any]) -> None:
        self.adapter = adapter
        self.packed = packed


class LoraAdapters:
    """The products that adapters change, the adapters that are loaded, and which of them each slot uses.

    Args:
        capacity: The number of adapters that are loaded at a time.
        max_rank: The highest rank of an adapter.
        num_slots: The number of requests that may run at once.
    """

    def __init__(self, capacity: int, max_rank: int, num_slots: int) -> None:
        self.capacity = capacity
        self.max_rank = max_rank
        self.number_by_slot = np.full(num_slots, _BASE, np.int32)
        """The number of each slot's adapter, -1 for the base model."""
        self.number_T = np.empty(0, np.int32)
        """The number of the adapter of each token of the step."""
        self.device_number_T = torch.empty(0, dtype=torch.int32)
        """The same on the device, if products need it there."""
        self.on_load: Callable[[], None] = lambda: None
        """Called before the factors of an adapter are packed."""
        self._products: list[AdaptedProduct] = []
        self._modules: set[str] = set()
        self._loaded: dict[int, LoadedAdapter] = {}
        self._rows: list[tuple[int, Tensor]] | None = None

    def prepare(
        self,
        tensor_names: Sequence[tuple[str, str]],
        shard: ModelShard,
        kernels: LayerKernels | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Prepare for the part `shard` of a model. `tensor_names` is that of `ModelSpec`.

        Products in torch multiply by the factors with `kernels`, in `dtype`.
        """
        self._tensor_names, self._shard = tensor_names, shard
        self.kernels, self.dtype = kernels or LayerKernels(), dtype

    def add_product(self, product: AdaptedProduct) -> None:
        """Add a product that adapters may change."""
        self._products.append(product)
        self._modules.update(part.rows.name for part in product.parts)

    def load(self, adapter: LoraAdapter) -> LoadedAdapter:
        """Read an adapter, and pack what it changes. This may run in another thread during steps.

        Raises:
            CheckpointError: The adapter does not fit this model, or its files are missing, damaged or changed.
        """
        for loaded in list(self._loaded.values()):
            if loaded.adapter == adapter:
                return loaded
        adapter.verify()
        file = PEFTAdapter(Path(adapter.path), self.max_rank)
        modules = self._find_modules(file)
        packed: list[Any] = []
        self.on_load()
        for product in self._products:
            changes = [self._read(file, modules, part) for part in product.parts]
            if not any(changes):
                packed.append(None)
                continue
            try:
                packed.append(product.pack(changes))
            except ValueError:
                raise file.error("it has numbers that are not finite, or too large") from None
        # The files may have changed while they were read.
        adapter.verify()
        return LoadedAdapter(adapter, packed)

    def install(self, number: int, loaded: LoadedAdapter) -> None:
        """Give a number to a loaded adapter, instead of the adapter that had it. No slot may use that one."""
        for product, packed in zip(self._products, loaded.packed, strict=True):
            product.install(number, packed)
        self._loaded[number] = loaded

    def set_slot(self, slot: int, number: int) -> None:
        """Use an adapter for a slot, or the base model if the number is -1."""
        self.number_by_slot[slot] = number

    def begin_step(self, slots_T: Int32Array) -> None:
        """Use the adapters of the slots of a step's tokens."""
        self.number_T = self.number_by_slot[slots_T]
        self._rows = None

    def rows_by_adapter(self) -> list[tuple[int, Tensor]]:
        """Return the number of each adapter of the step, and its rows."""
        if self._rows is None:
            self._rows = [
                (int(number), torch.from_numpy(np.flatnonzero(self.number_T == number)))
                for number in np.unique(self.number_T)
                if number != _BASE
            ]
        return self._rows

    def _find_modules(self, file: PEFTAdapter) -> dict[str, str]:
        """Return the adapter's modules by their names in this model, as far as they are in this shard."""
        modules = {}
        for module in file.modules():
            name = f"{module}.weight"
            for pattern, replacement in self._tensor_names:
                name = re.sub(pattern, replacement, name)
            layer = _LAYER.search(name.removesuffix(".weight"))
            if layer is None or int(layer[1]) >= self._shard.num_layers:
                raise file.error(
                    f"the module {module} cannot be adapted; only those in the model's {self._shard.num_layers} layers can"
                )
            if int(layer[1]) not in self._shard.layers:
                continue
            if layer[0] not in self._modules:
                raise file.error(
                    f"the module {module} of this model cannot be adapted; only projections of attention, of recurrent "
                    "layers and of dense MLPs can"
                )
            modules[layer[0]] = module
        return modules

    def _read(
        self, file: PEFTAdapter, modules: dict[str, str], part: AdaptedMatrix
    ) -> LowRank | None:
        module = modules.get(part.rows.name)
        if module is None:
            return None
        low = file.read(module)
        found = [len(low.up_OR), low.down_RI.shape[1]]
        if found != [part.rows.total, part.num_columns]:
            raise file.error(
                f"{module} is for a matrix of shape {found}, but the model's has "
                f"{[part.rows.total, part.num_columns]}; the adapter is for another model"
            )
        return part.changed(low)


def load_at_start(loras: LoraAdapters, adapters: Sequence[LoraAdapter]) -> None:
    """Load adapters, of which as many stay as fit.

    Raises:
        CheckpointError: One of them cannot be used.
    """
    for index, adapter in enumerate(adapters):
        loras.install(index % loras.capacity, loras.load(adapter))
