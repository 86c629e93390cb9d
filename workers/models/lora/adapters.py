"""The LoRA adapters of a decoder. The rows of a step may use different adapters.

Shapes: T tokens of a step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ....protocol.arrays import Int32Array
from ....protocol.file_identity import LoraAdapter
from ...layers.layers import LayerKernels
from ...layers.parallel.shard import ModelShard
from ...layers.spec import ModelSpec
from ...loaders.checkpoint import Checkpoint
from ...loaders.gguf_adapter import GGUFAdapter
from ...loaders.peft_adapter import Change, PEFTAdapter, Replacement
from ...loaders.row_factors import FactoredCheckpoint
from .matrices import EMBEDDING, HEAD, AdaptedMatrix, AdaptedProduct, scale_rows

AdapterFiles: TypeAlias = PEFTAdapter | GGUFAdapter

_BASE: Final = -1
_LAYER: Final = re.compile(r"layers\.(\d+)\..+")
_FACTORED: Final = re.compile(rf"{_LAYER.pattern}|{HEAD}$")
_OUTSIDE_LAYERS: Final = re.compile(r"(?:^|\.)(embed_tokens|lm_head|score_head\.\w+)$")


class LoadedAdapter:
    """An adapter on the device. `packed` has its change of each matrix product, in the model's order."""

    def __init__(self, adapter: LoraAdapter, packed: list[Any]) -> None:
        self.adapter = adapter
        self.packed = packed


class RowAdapters:
    """The adapter number of each row, -1 for the base model."""

    def __init__(self, number_T: Int32Array) -> None:
        self.number_T = number_T
        self._rows: list[tuple[int, Tensor]] | None = None

    def rows_by_adapter(self) -> list[tuple[int, Tensor]]:
        """Yield each adapter number that occurs, with the indices of its rows."""
        if self._rows is None:
            self._rows = [
                (number, torch.from_numpy(np.flatnonzero(self.number_T == number)))
                for number in sorted(set(self.number_T.tolist()))
                if number != _BASE
            ]
        return self._rows


class LoraAdapters:
    """The products that adapters can change, the loaded adapters, and the adapter of each slot.

    Args:
        capacity: The number of adapters that can be loaded at the same time.
        max_rank: The highest allowed rank of an adapter.
        num_slots: The number of requests that may run at the same time.
    """

    def __init__(self, capacity: int, max_rank: int, num_slots: int) -> None:
        self.capacity = capacity
        self.max_rank = max_rank
        self.number_by_slot = np.full(num_slots, _BASE, np.int32)
        """The adapter number of each slot, -1 for the base model."""
        self.tokens = RowAdapters(np.empty(0, np.int32))
        """The adapters of the current step's tokens."""
        self.device_number_T = torch.empty(0, dtype=torch.int32)
        """The adapter number of each token of the current step, on the device if products need it there."""
        self.on_load: Callable[[], None] = lambda: None
        """A function that is called before the factors of an adapter are packed."""
        self._row_factors: dict[str, Tensor | None] = {}
        """The factors on the outputs of modules, by name; None for a module whose rows are divided by their norms."""
        self._products: list[AdaptedProduct] = []
        self._modules: set[str] = set()
        self._loaded: dict[int, LoadedAdapter] = {}

    def prepare(
        self,
        spec: ModelSpec,
        shard: ModelShard,
        checkpoint: Checkpoint,
        kernels: LayerKernels | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Prepare for the part `shard` of the model `spec`.

        Factors of the checkpoint's matrices also apply to what adapters add to these.
        Products in torch use `kernels` to multiply by the factors, in `dtype`, by default float32.
        """
        self._spec, self._shard = spec, shard
        self.kernels, self.dtype = kernels or LayerKernels(), dtype or torch.float32

        if isinstance(checkpoint, FactoredCheckpoint):
            self._row_factors = {
                found[0]: factors
                for name, factors in checkpoint.factors_by_name().items()
                if (found := _FACTORED.search(name.removesuffix(".weight"))) is not None
            }

    def add_product(self, product: AdaptedProduct) -> None:
        """Add a product that adapters may change."""
        self._products.append(product)
        self._modules.update(part.rows.name for part in product.parts)

    def load(self, adapter: LoraAdapter) -> LoadedAdapter:
        """Read an adapter, and pack its changes. May run in another thread during steps.

        Raises:
            CheckpointError: The adapter does not fit this model, or its files are missing, damaged or changed.
        """
        for loaded in list(self._loaded.values()):
            if loaded.adapter == adapter:
                return loaded
        adapter.verify()
        path = Path(adapter.path)
        file: AdapterFiles
        if adapter.is_gguf:
            sizes = (self._spec.for_layer(layer) for layer in self._spec.layers)
            heads = [(each.num_heads, each.num_kv_heads) for each in sizes]
            file = GGUFAdapter(path, self.max_rank, adapter.scale, heads)
        else:
            file = PEFTAdapter(path, self.max_rank, adapter.scale)
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
                raise file.error("it has numbers that are too large") from None
        # The files may have changed while they were read.
        adapter.verify()
        return LoadedAdapter(adapter, packed)

    def install(self, number: int, loaded: LoadedAdapter) -> None:
        """Replace the adapter with this number by a loaded one. No slot may be using the old one."""
        for product, packed in zip(self._products, loaded.packed, strict=True):
            product.install(number, packed)
        self._loaded[number] = loaded

    def set_slot(self, slot: int, number: int) -> None:
        """Let a slot use the adapter with this number, or the base model if it is -1."""
        self.number_by_slot[slot] = number

    def begin_step(self, slots_T: Int32Array) -> None:
        """Determine the adapters of a step's tokens from their slots."""
        self.tokens = self.of_slots(slots_T)

    def of_slots(self, slots_T: Int32Array) -> RowAdapters:
        """Return the adapters of rows that belong to these slots."""
        return RowAdapters(self.number_by_slot[slots_T])

    def rows_by_adapter(self) -> list[tuple[int, Tensor]]:
        """Yield each adapter number of the step, with the indices of its rows."""
        return self.tokens.rows_by_adapter()

    def _find_modules(self, file: AdapterFiles) -> dict[str, str]:
        """Return the adapter's modules that are in this shard, by their names in this model."""
        modules = {self._name_of(file, module): module for module in file.modules()}
        if file.ties_embeddings and self._spec.tie_word_embeddings and EMBEDDING in modules:
            modules.setdefault(HEAD, modules[EMBEDDING])
        own = {name: module for name, module in modules.items() if self._is_own(name)}
        for name, module in own.items():
            if name not in self._modules:
                raise file.error(
                    f"the module {module} of this model cannot be adapted; only the projections of "
                    "attention except kv_b_proj, of recurrent layers and of dense MLPs can be adapted, "
                    "and on a CPU also the embedding, the output head, and experts without "
                    "--enable-expert-parallel"
                )
        return own

    def _name_of(self, file: AdapterFiles, module: str) -> str:
        """Return the name in this model of an adapter's module."""
        name = f"{module}.weight"
        for pattern, replacement in self._spec.tensor_names:
            name = re.sub(pattern, replacement, name)
        name = name.removesuffix(".weight")
        if (outside := _OUTSIDE_LAYERS.search(name)) is not None:
            return outside[1]
        layer = _LAYER.search(name)
        if layer is None or int(layer[1]) >= self._shard.num_layers:
            raise file.error(
                f"the module {module} cannot be adapted; only modules in the model's "
                f"{self._shard.num_layers} layers, the embedding and the heads can be adapted"
            )
        return layer[0]

    def _is_own(self, name: str) -> bool:
        if (layer := _LAYER.search(name)) is not None:
            return int(layer[1]) in self._shard.layers
        return self._shard.is_first if name == EMBEDDING else self._shard.is_last

    def _read(
        self, file: AdapterFiles, modules: dict[str, str], part: AdaptedMatrix
    ) -> Change | None:
        module = modules.get(part.rows.name)
        if module is None:
            return None
        change = file.read(module)
        if isinstance(change, Replacement):
            found, tensors = list(change.weight.shape), [change.weight, change.bias]
            for name, tensor in (("weight", change.weight), ("bias", change.bias)):
                if tensor is not None and name not in part.replaceable:
                    raise file.error(
                        f"the {name} of the module {module} cannot be replaced (modules_to_save); merge the "
                        "adapter into the model"
                    )
            if change.bias is not None and list(change.bias.shape) != [part.rows.total]:
                found = list(change.bias.shape)
        else:
            if change.bias_O is not None and not self.kernels.finds_rows:
                raise file.error(
                    f"{module} has a bias (lora_bias), which is not supported on a GPU; merge the adapter "
                    "into the model"
                )
            found, tensors = (
                [len(change.up_OR), change.down_RI.shape[1]],
                [change.up_OR, change.down_RI, change.bias_O],
            )
        if found != part.shape:
            raise file.error(
                f"{module} is for a matrix of shape {found}, but the model's has {part.shape}; "
                "the adapter is for another model"
            )
        if not all(tensor is None or bool(tensor.isfinite().all()) for tensor in tensors):
            raise file.error(f"{module} has numbers that are not finite")
        if part.rows.name in self._row_factors:
            factors_O = self._row_factors[part.rows.name]
            if factors_O is None:
                raise file.error(
                    f"{module} cannot be adapted, because this model divides its rows by their norms; "
                    "merge the adapter into the model"
                )
            change = scale_rows(change, factors_O)
        return part.changed(change)


def load_at_start(loras: LoraAdapters, adapters: Sequence[LoraAdapter]) -> None:
    """Load all adapters one after another, which checks them. The last ones stay loaded, as many as fit.

    Raises:
        CheckpointError: One of them cannot be used.
    """
    for index, adapter in enumerate(adapters):
        loras.install(index % loras.capacity, loras.load(adapter))
