"""Reads the weights of a decoder from a checkpoint, by name, with every shape checked."""

import math
import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...protocol.errors import CheckpointError, counted
from ..device.dtypes import HostDevice, HostDtype, dtype_name, torch_device, torch_dtype
from ..layers.layers import Linear
from ..layers.parallel.shard import ModelShard
from ..loaders.checkpoint import Checkpoint
from ..loaders.dummy import DummyCheckpoint, made_up
from ..loaders.quantization.matrix import QuantizedMatrix, Weight, join_columns, join_rows
from ..loaders.quantization.row_tables import RowTable
from ..loaders.row_factors import FactoredCheckpoint, RowFactors
from ..loaders.tensor_names import EMBEDDING, HEAD, TensorNames, translate_names
from ..loaders.upload import PinnedUpload
from .lora.adapters import LoraAdapters
from .lora.linear import adapt
from .lora.matrices import AdaptedMatrix, AdaptedRows

ProgressCallback = Callable[[int, int], None]
"""A function that is called with (loaded bytes, total bytes) while weights are loaded."""

_FIRST_OUTPUTS = tuple(f"layers.0.self_attn.{name}.weight" for name in ("o_proj", "o_a_proj"))
_FIRST_STAGE = (
    *("embed_positions.", "embed_token_types.", "embed_tasks.", "embed_norm.", "embed_global."),
    "embed_stream.",
    "embed_ngram",
    "embed_projection.",
    *("embed_scale", "embed_bias", "embed_tokens_per_layer."),
    "per_layer_",
    "altup_projections.",
    "initial_state",
)
_LAST_STAGE = ("norm.", "altup_unembed_projections.", "head_", "score_head.")
_KV_SCALES = ("k_scale", "v_scale")
_OPTIONAL = ("rotary_emb.inv_freq", "rotary_emb.alpha", *_KV_SCALES)
_LAYER = re.compile(r"layers\.(\d+)\.")
_ROWS_AT_ONCE = 1 << 16


class Rows(msgspec.Struct, frozen=True):
    """Rows `part` of the module `name`, which has `total` rows.

    If `order` is given, it lists the rows to take, as indices within the part. Unless `has_bias`, the bias of these
    rows is 0 and not stored, even if other rows of a product have one. A stored bias applies to `rows_per_bias` rows.
    `own_bias` are the elements of another tensor that has the biases.
    """

    name: str
    total: int
    part: range
    order: Tensor | None = None
    has_bias: bool = True
    rows_per_bias: int = 1
    own_bias: "Rows | None" = None

    @property
    def biases(self) -> tuple[int, range]:
        """The number of stored biases, and the range of those that the part has."""
        size = self.rows_per_bias
        return self.total // size, range(self.part.start // size, self.part.stop // size)

    @property
    def count(self) -> int:
        """The number of selected rows."""
        return len(self.part) if self.order is None else len(self.order)

    def select(self, x: Tensor) -> Tensor:
        """Return the selected rows of `x`, which has the rows in `part`."""
        return x if self.order is None else x[self.order.to(x.device)]

    def select_array(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the selected rows of the numpy array `x`; see `select`."""
        return x if self.order is None else x[self.order.numpy()]

    def select_from_all(self, x: Tensor) -> Tensor:
        """Return the selected rows of all `total` rows `x`."""
        return self.select(x[self.part.start : self.part.stop])


class WeightReader:
    """Reads the tensors of the text decoder, under whatever prefix the checkpoint uses, and checks their shapes.

    `finish` checks that every tensor was read that belongs to `shard`, by default the whole model. `has_head` says
    whether the output projection is a separate tensor, and `has_embedding` whether the model starts from tokens.
    Quantized matrices stay quantized if `can_keep` accepts them. `tensor_names` are those of `ModelSpec`; all names
    here are the translated ones. Tensors are multiplied by `row_factors`. If `is_transposed`, matrices of layers are
    stored as [inputs, outputs] unless they are quantized. If `loras` is given, products add its adapters.
    """

    loras: LoraAdapters | None = None

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype | HostDtype,
        device: torch.device | HostDevice,
        *,
        has_head: bool,
        has_embedding: bool = True,
        tensor_names: TensorNames = (),
        row_factors: Sequence[RowFactors] = (),
        is_transposed: bool = False,
        can_keep: Callable[[QuantizedMatrix], bool] | None = None,
        shard: ModelShard | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.any_dtype = dtype
        self._device = device
        self._can_keep = can_keep
        self._is_transposed = is_transposed
        self._is_tied = not has_head
        self._stored = translate_names(checkpoint.names(), tensor_names)
        factored: set[str] = set()
        if row_factors:
            self.checkpoint = FactoredCheckpoint(checkpoint, row_factors, self._stored)
            factored = self.checkpoint.vectors
        markers = (EMBEDDING,) if has_embedding else _FIRST_OUTPUTS
        found = next((name for name in sorted(self._stored) if name.endswith(markers)), None)
        if found is None:
            raise self._error(f"there is no tensor named '...{markers[0]}'")
        self._prefix = found.removesuffix(next(each for each in markers if found.endswith(each)))
        self._unread = {
            name
            for name in self._stored
            if name.startswith(self._prefix) and not name.endswith(_OPTIONAL)
        } - factored
        self._head = next((name for name in sorted(self._stored) if name.endswith(HEAD)), HEAD)
        self._unread.discard(self._head)
        if has_head and self._head in self._stored:
            self._unread.add(self._head)
        if shard is not None:
            self._unread -= {name for name in self._unread if self._is_elsewhere(name, shard)}
        self._on_progress = on_progress
        self._loaded = 0
        self._total = sum(self._size(name) for name in self._unread)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensors."""
        return torch_dtype(self.any_dtype)

    @property
    def dtype_name(self) -> str:
        """The name of the dtype of the tensors."""
        return dtype_name(self.any_dtype)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return torch_device(self._device)

    def read(self, name: str, *shape: int, part: range | None = None, dim: int = 0) -> Tensor:
        """Return the decoder's tensor `name`, e.g. "layers.0.mlp.up_proj.weight", or a range of a dimension."""
        return self._read(self._prefix + name, shape, part, dim)

    def read_vector(self, name: str, size: int, part: range | None = None) -> Tensor:
        """Read a vector in float32, so that values stored with more bits than `dtype` keep them."""
        return self._read(self._prefix + name, (size,), part, dtype=torch.float32)

    def read_float32(self, name: str, *shape: int) -> Tensor:
        """Read a tensor like `read`, but in float32."""
        return self._read(self._prefix + name, shape, dtype=torch.float32)

    def read_elements(self, name: str, size: int) -> Tensor:
        """Read a tensor of any shape with `size` elements as a float32 vector."""
        stored = self._stored_shape(self._prefix + name, (size,))
        shape = stored if math.prod(stored) == size else (size,)
        return self._read(self._prefix + name, shape, dtype=torch.float32).flatten()

    def num_rows(self, name: str, default: int) -> int:
        """Return the number of rows of the module `name`. A reader without a checkpoint returns `default`."""
        return self._stored_shape(f"{self._prefix}{name}.weight", (default,))[0]

    def _stored_shape(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a tensor in the checkpoint. A reader without a checkpoint returns `default`."""
        return self._shape(name)

    def skip(self, prefixes: Sequence[str]) -> None:
        """Mark the tensors with these prefixes as not needed, because another rank reads them."""
        start = tuple(self._prefix + prefix for prefix in prefixes)
        skipped = {name for name in self._unread if name.startswith(start)}
        self._unread -= skipped
        self._total -= sum(map(self._size, skipped))

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has the decoder's tensor `name`."""
        return self._prefix + name in self._stored

    def rows(
        self, prefix: str, names: Sequence[str], sizes: Sequence[int], parts: Sequence[range]
    ) -> list[Rows]:
        """Return the rows `parts` of the modules `names`, which have `sizes` rows.

        They may be stored as one module with a joint name: "gate_up_proj" for "gate_proj" and "up_proj", or
        "up_gate_proj" if it stores them in that order.
        """
        for order in (range(len(names)), range(len(names))[::-1]):
            fused = "_".join(names[i].removesuffix("_proj") for i in order) + "_proj"
            fused = "qkv_proj" if fused == "q_k_v_proj" else fused
            if f"{self._prefix}{prefix}{fused}.weight" in self._stored:
                starts = dict(
                    zip(order, accumulate((sizes[i] for i in order), initial=0), strict=False)
                )
                return [
                    Rows(
                        f"{prefix}{fused}",
                        sum(sizes),
                        range(starts[i] + part.start, starts[i] + part.stop),
                    )
                    for i, part in enumerate(parts)
                ]
        return [
            Rows(f"{prefix}{name}", size, part)
            for name, size, part in zip(names, sizes, parts, strict=True)
        ]

    def read_biases(self, rows: Sequence[Rows]) -> Tensor:
        """Return the concatenated biases of rows of several modules."""
        parts = [self._read_bias(each) for each in rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read_table(self, name: str, rows: int, columns: int, part: range) -> Tensor | RowTable:
        """Return rows of a matrix of which a step needs a few, quantized if they are stored so."""
        full = self._prefix + name
        self._check(full, (rows, columns))
        table = self.checkpoint.table(self._stored.get(full, full), self.dtype, part)
        if table is not None:
            self._mark_read(full)
            return table.to(self.device)
        matrix = torch.empty(len(part), columns, dtype=self.dtype, device=self.device)
        for start in range(0, len(part), _ROWS_AT_ONCE):
            own = part[start : start + _ROWS_AT_ONCE]
            matrix[start : start + len(own)] = self.read(name, rows, columns, part=own)
        return matrix

    def _read_bias(self, rows: Rows) -> Tensor:
        if not rows.has_bias:
            return torch.zeros(rows.count, dtype=self.dtype, device=self.device)
        if (own := rows.own_bias) is not None:
            return own.select(self.read(own.name, own.total, part=own.part))
        count, part = rows.biases
        stored = self.read(f"{rows.name}.bias", count, part=part)
        return rows.select(stored.repeat_interleave(rows.rows_per_bias))

    def read_matrix(
        self, name: str, rows: int, columns: int, part: range | None = None, dim: int = 0
    ) -> Weight:
        """Return a matrix for products, quantized if it is stored so and can be kept."""
        matrix = self._read_matrix(self._prefix + name, (rows, columns), part, dim)
        return join_rows([matrix], self.dtype)

    def read_matrix_columns(
        self, name: str, rows: int, columns: int, parts: Sequence[range]
    ) -> Weight:
        """Return ranges of a matrix's columns side by side, quantized if it is stored so and can be kept."""
        name = self._prefix + name
        matrices = [self._read_matrix(name, (rows, columns), part, 1) for part in parts]
        return join_columns(matrices, self.dtype)

    def read_matrix_rows(self, rows: Sequence[Rows], columns: int) -> Weight:
        """Return rows of several modules for products, quantized if all of them can be kept so."""
        names = (f"{self._prefix}{r.name}.weight" for r in rows)
        parts = [
            self._read_matrix(name, (r.total, columns), r.part)
            for name, r in zip(names, rows, strict=True)
        ]
        ordered = [_ordered(part, r.order) for part, r in zip(parts, rows, strict=True)]
        return join_rows(ordered, self.dtype)

    def adapt_rows(self, linear: Linear, rows: Sequence[Rows], columns: int) -> Linear:
        """Return a product with rows of several modules, to which LoRA adapters add."""
        parts = [
            AdaptedMatrix(AdaptedRows(r.name, r.total, r.select_from_all), columns) for r in rows
        ]
        return adapt(linear, parts, self.loras, self.device)

    def adapt_columns(
        self, linear: Linear, name: str, rows: int, columns: int, part: range
    ) -> Linear:
        """Return a product with some columns of a module, to which LoRA adapters add."""
        matrix = AdaptedMatrix(AdaptedRows(name, rows, lambda x: x), columns, part)
        return adapt(linear, [matrix], self.loras, self.device)

    def read_head_bias(self, vocab_size: int, part: range | None = None) -> Tensor:
        """Return the bias of the output projection, or a part of it. It may be stored as a vector or as one row."""
        name = self._head.removesuffix("weight") + "bias"
        if self._stored_shape(name, (vocab_size,)) == (1, vocab_size):
            return self._read(name, (1, vocab_size), part, 1).flatten()
        return self._read(name, (vocab_size,), part)

    def head_rows(self, vocab_size: int, num_unused: int) -> int:
        """Return the number of rows of the output projection, which may also have rows that no token has."""
        stored, *_ = self._stored_shape(self._head, (vocab_size,))
        return stored if stored == vocab_size + num_unused else vocab_size

    def read_head(
        self, vocab_size: int, hidden_size: int, part: range, num_unused: int = 0
    ) -> Weight:
        """Return some rows of the output projection. Not for models in which it is the embedding."""
        shape = self.head_rows(vocab_size, num_unused), hidden_size
        return join_rows([self._read_matrix(self._head, shape, part)], self.dtype)

    def read_padded_head(
        self, vocab_size: int, hidden_size: int, part: range, num_missing: int
    ) -> Tensor:
        """Return some rows of an output projection that lacks the last `num_missing` rows, which become 0."""
        num_stored = vocab_size - num_missing
        stored = range(min(part.start, num_stored), min(part.stop, num_stored))
        head = self._read(self._head, (num_stored, hidden_size), stored)
        return torch.cat((head, head.new_zeros(len(part) - len(stored), hidden_size)))

    def read_score_head(self, name: str, *shape: int) -> Tensor:
        """Return a tensor of the classification head in float32. Its name has no prefix."""
        return self._read(f"score_head.{name}", shape, dtype=torch.float32)

    def read_token_rows(
        self, token_ids: Sequence[int], vocab_size: int, hidden_size: int, *, of_embedding: bool
    ) -> Tensor:
        """Return the rows of some tokens in the output projection, or in the embedding, in float32.

        Without `token_ids`, these are the rows of all tokens.
        """
        name = self._prefix + EMBEDDING if of_embedding else self._head
        shape = vocab_size, hidden_size
        parts = [range(i, i + 1) for i in token_ids] or [range(vocab_size)]
        return torch.cat([self._read(name, shape, part, dtype=torch.float32) for part in parts])

    def read_kv_scales(self, prefix: str, num_kv_heads: int, heads: range) -> Tensor | None:
        """Return the divisors of these heads' keys and values in an FP8 cache, float32 [2, G]; None if none are stored.

        A calibrated checkpoint has one number per layer for keys and one for values, or one per head.
        """
        names = [f"{self._prefix}{prefix}{name}" for name in _KV_SCALES]
        if not self._stored.keys() >= set(names):
            return None
        scales = []
        for name in names:
            scale = self.checkpoint.tensor(self._stored_name(name), torch.float32).reshape(-1)
            if len(scale) not in (1, num_kv_heads):
                raise self._error(
                    f"the tensor {name!r} has {len(scale)} scales for {num_kv_heads} heads"
                )
            scales.append(scale.expand(num_kv_heads)[heads.start : heads.stop])
        return torch.stack(scales).to(self.device)

    def finish(self) -> None:
        """Raise CheckpointError if tensors are left that the decoder does not use, as of another model."""
        unread = [name for name in self._unread if not self._changes_nothing(name)]
        if unread:
            raise self._error(
                f"{counted(len(unread), 'tensor')} cannot belong to a model with this configuration, beginning "
                f"with {min(unread)!r}"
            )

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        part: range | None = None,
        dim: int = 0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        self._check(name, shape)
        tensor = self.checkpoint.tensor(
            self._stored_name(name), dtype or self.dtype, part=part, dim=dim
        )
        self._mark_read(name)
        return tensor.to(self.device)

    def _read_matrix(
        self, name: str, shape: tuple[int, int], part: range | None = None, dim: int = 0
    ) -> Tensor | QuantizedMatrix:
        if self._is_stored_transposed(name):
            columns = part or range(shape[dim])
            return self._read(name, shape[::-1], columns, 1 - dim).T.contiguous()
        self._check(name, shape)
        if self._can_keep is None:
            return self._read(name, shape, part, dim)
        matrix = self.checkpoint.quantized(self._stored_name(name), part=part, dim=dim)
        if matrix is None or not self._can_keep(matrix):
            return self._read(name, shape, part, dim)
        self._mark_read(name)
        return matrix.to(self.device)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        found = self._shape(name)
        if found != shape:
            raise self._error(
                f"the tensor {name!r} has shape {list(found)}, the config needs {list(shape)}"
            )

    def _mark_read(self, name: str) -> None:
        """Mark a tensor as read, even if only a part of it was read."""
        if name in self._unread:
            self._unread.discard(name)
            self._loaded += self._size(name)
        if self._on_progress is not None:
            self._on_progress(self._loaded, self._total)

    def _is_elsewhere(self, name: str, shard: ModelShard) -> bool:
        """Return whether the tensor belongs to another pipeline stage."""
        head = (self._head, self._head.removesuffix("weight") + "bias")
        name = name if name in head else name.removeprefix(self._prefix)
        if match := _LAYER.match(name):
            return int(match[1]) in range(shard.num_layers) and int(match[1]) not in shard.layers
        if name.startswith(_FIRST_STAGE):
            return not shard.is_first
        if name == EMBEDDING:
            return not (shard.is_first or (shard.is_last and self._is_tied))
        return (name in head or name.startswith(_LAST_STAGE)) and not shard.is_last

    def _size(self, name: str) -> int:
        return self.checkpoint.num_bytes(self._stored_name(name), self.any_dtype.itemsize)

    def _changes_nothing(self, name: str) -> bool:
        """Return whether a tensor is empty, as in MLPs without elements, or a bias of zeros, as quantizers add."""
        if name.endswith(".bias"):
            return not self.checkpoint.tensor(self._stored_name(name)).any()
        return 0 in self._shape(name)

    def _stored_name(self, name: str) -> str:
        stored = self._stored.get(name)
        if stored is None:
            raise self._error(f"the tensor {name!r} is missing")
        return stored

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.checkpoint.shape(self._stored_name(name)))

    def _is_stored_transposed(self, name: str) -> bool:
        """Return whether a matrix is stored as [inputs, outputs]. Quantized ones are not, because tools turn them."""
        may_be = self._is_transposed and _LAYER.search(name) is not None
        return may_be and self.checkpoint.quantized(self._stored_name(name), part=range(1)) is None

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(self.checkpoint.path, problem)


def _ordered(matrix: Tensor | QuantizedMatrix, order: Tensor | None) -> Tensor | QuantizedMatrix:
    if order is None:
        return matrix
    order = order.to((matrix if isinstance(matrix, Tensor) else matrix.values_OD).device)
    return matrix[order] if isinstance(matrix, Tensor) else matrix.select_rows(order)


class DummyWeightReader(WeightReader):
    """Creates random tensors with the shapes that are requested, for `LoadFormat.DUMMY`."""

    def __init__(self, checkpoint: DummyCheckpoint, dtype: torch.dtype, device: torch.device):
        self.checkpoint = checkpoint
        self.any_dtype = dtype
        self._device = device
        self._stored = {}
        self._unread = set()
        self._prefix = ""
        self._head = HEAD
        self._can_keep = None
        self._is_transposed = False
        self._total = 0

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        part: range | None = None,
        dim: int = 0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        if part is not None:
            shape = (*shape[:dim], len(part), *shape[dim + 1 :])
        return made_up(name, shape, dtype or self.dtype, self.device)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Do nothing, because any name and shape is valid."""

    def _stored_shape(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        return default


def weight_reader(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, **options: Any
) -> WeightReader:
    """Return the reader for this kind of checkpoint. `options` are passed to `WeightReader`."""
    if isinstance(checkpoint, DummyCheckpoint):
        return DummyWeightReader(checkpoint, dtype, device)
    if device.type == "cuda":
        checkpoint.place = PinnedUpload(device)
    return WeightReader(checkpoint, dtype, device, **options)
