"""Read a checkpoint's weights in the packed layout of the native kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ...protocol.checkpoint.gguf import BLOCK_SIZES
from ...protocol.checkpoint.gguf import GGMLQuantizationType as SourceType
from ..device.dtypes import HostDevice, HostDtype, dtype_name
from ..layers.parallel.shard import ModelShard
from ..layers.parallel.tensor_parallel import TensorParallel
from ..loaders.checkpoint import Checkpoint, Floats
from ..loaders.gguf import GGUFCheckpoint
from ..loaders.quantization.matrix import QuantizedMatrix
from ..loaders.quantization.scheme import ColumnGroups
from ..loaders.row_factors import RowFactors
from ..loaders.stored.packed_file import PackedFile
from ..loaders.tensor_names import TensorNames
from ..models.weights import ProgressCallback, Rows, WeightReader
from .library import NotSupportedNatively
from .packing import (
    FLOAT8_ROWS,
    FLOAT_FORMATS,
    FLOAT_TYPES,
    GROUP_SIZE,
    QUANTIZED_FORMATS,
    ActivationKind,
    PackedWeight,
    WeightFormat,
    WeightMemory,
    allocate_packed,
    as_source,
    can_pack,
    finish_packing,
    pack_rows,
    pack_tensor,
    round_up,
)

QUANTIZATIONS = {"int4": WeightFormat.U4_OFFSET, "int8": WeightFormat.U8}
"""Packed formats to which float matrices can be quantized while they are read, by names of `--quantization`."""


_LARGEST_BLOCK = max(elements for elements, _ in BLOCK_SIZES.values())
_ELEMENTS_AT_ONCE = 2 << 20
_ROWS_TOGETHER = 64
"""Number of rows that BF16 packs together; see `csrc/linear/pack.h`."""

_EMBEDDINGS = ("embed_tokens.weight", "embed_tokens_per_layer.weight", "ngram_embedding.weight")

_DAMAGED = (
    "the tensor {name} has NaN or infinite numbers; the file, or the model it was quantized from, is "
    "damaged: download it again"
)


MatrixCallback: TypeAlias = Callable[[PackedWeight, Rows, int, range | None], None]

RowSource: TypeAlias = Callable[[int, int], tuple[int, NDArray[np.uint8]]]
"""A function that returns the type of a range of rows, and the rows as uint8 ``[rows, row bytes]``."""


class NativeWeightReader(WeightReader):
    """Reads the matrices of a decoder in packed form, and its vectors as float32.

    Quantized matrices keep their values if they are float8, or if a GGUF type that has a packed format can represent
    them. Other quantized matrices of GGUF files become int8 in groups of 32, and those of other checkpoints are
    dequantized. Float matrices are packed in `dtype`.

    If `quantization` is set, float and float8 matrices are quantized if their rows consist of whole groups; embedding
    and head to at least int8. If `keeps_float16`, matrices stored in float16 stay float16. `on_matrix` is called for
    the matrices of a layer's products, with their rows, the number of columns, and the range of columns that was read;
    None for all. Matrices in the file `packed` are mapped instead.

    Threads may still be packing a matrix that was returned, until `finish` or `wait_until_packed`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype | HostDtype,
        *,
        has_head: bool,
        has_embedding: bool = True,
        tensor_names: TensorNames = (),
        row_factors: Sequence[RowFactors] = (),
        is_transposed: bool = False,
        quantization: str | None = None,
        keeps_float16: bool = False,
        num_threads: int = 1,
        shard: ModelShard | None = None,
        on_progress: ProgressCallback | None = None,
        on_matrix: MatrixCallback | None = None,
        packed: PackedFile | None = None,
    ) -> None:
        super().__init__(
            checkpoint,
            dtype,
            HostDevice(),
            has_head=has_head,
            has_embedding=has_embedding,
            tensor_names=tensor_names,
            row_factors=row_factors,
            is_transposed=is_transposed,
            shard=shard,
            on_progress=on_progress,
        )
        self._quantization = None if quantization is None else QUANTIZATIONS[quantization]
        self._keeps_float16 = keeps_float16
        self._num_threads = num_threads
        self._on_matrix = on_matrix
        self._packed_file = packed
        self._memory = WeightMemory()
        self._threads = ThreadPoolExecutor(num_threads)
        self._packing: list[Future[None]] = []

    def finish(self) -> None:
        """See `WeightReader.finish`. Wait until all matrices are packed."""
        super().finish()
        self.wait_until_packed()
        self._threads.shutdown()

    def wait_until_packed(self) -> None:
        """Wait until all matrices that were returned are packed, and raise the errors of packing them."""
        while self._packing:
            self._packing.pop().result()

    def vector(self, name: str, size: int, part: range | None = None) -> NDArray[np.float32]:
        """Return the decoder's tensor `name`, or a range of its `size` elements, as float32."""
        return self.floats(name, size, part=part)

    def floats(self, name: str, *shape: int, part: range | None = None) -> NDArray[np.float32]:
        """Return the decoder's tensor `name`, or a range of its first dimension, as float32."""
        name = self._prefix + name
        self._check(name, shape)
        stored = self.checkpoint.floats(self._stored_name(name), part=part)
        if stored is None:
            tensor = self._read(name, shape, part, dtype=torch.float32)
            values: NDArray[np.float32] = tensor.numpy()
            return values
        self._mark_read(name)
        return stored.as_float32()

    def packed(self, name: str, rows: int, columns: int, part: range | None = None) -> PackedWeight:
        """Return the decoder's matrix `name`, or a range of its rows, packed. `rows` and `columns` are its shape."""
        name = self._prefix + name
        return self._packed(name, rows, columns, self._format(name), part)

    def packed_float32(self, name: str, rows: int, columns: int) -> PackedWeight:
        """Return the decoder's matrix `name` packed as float32. `rows` and `columns` are its shape."""
        return self._packed(self._prefix + name, rows, columns, WeightFormat.F32, None)

    def packed_float(self, name: str, rows: int, columns: int, part: range) -> PackedWeight:
        """Return rows of the decoder's matrix `name`, packed as floats of `dtype`.

        `rows` and `columns` are its shape.
        """
        return self._packed(
            self._prefix + name, rows, columns, FLOAT_FORMATS[self.dtype_name], part
        )

    def packed_columns(
        self,
        name: str,
        rows: int,
        columns: int,
        parts: Sequence[range | Sequence[range]],
        rank: int,
    ) -> PackedWeight:
        """Return one rank's columns of the decoder's matrix `name`. `rows` and `columns` are its shape.

        `parts` has the columns of each rank: a range, or several ranges, which are put side by side.

        Raises:
            NotSupportedNatively: The columns of some rank do not consist of whole blocks.
        """
        module = Rows(name.removesuffix(".weight"), rows, range(rows))
        if len(parts) == 1:
            weight = self.packed(name, rows, columns)
            self._report(weight, module, columns)
            return weight
        name = self._prefix + name
        self._check(name, (rows, columns))
        weight_format = self._format(name)
        unit = GROUP_SIZE if weight_format.activation_kind == ActivationKind.INT8 else 1
        stored_type = self._packable_type(name, weight_format)
        if stored_type is not None:
            unit = max(unit, BLOCK_SIZES[stored_type][0])
        elif (
            weight_format is not WeightFormat.F8
            and (few := self._few_rows(name)) is not None
            and few.scale_OG.shape[1] > 1
        ):
            if not isinstance(self.checkpoint, GGUFCheckpoint):
                unit = max(unit, few.group_size)
            elif _block_type(few) is not None:
                unit = max(unit, BLOCK_SIZES[self.checkpoint.ggml_type(self._stored_name(name))][0])
        runs = [[part] if isinstance(part, range) else part for part in parts]
        if any(run.start % unit for part in runs for run in part):
            raise NotSupportedNatively(
                f"{columns} columns in blocks of {unit} cannot be divided among {len(parts)} workers "
                "(--tensor-parallel-size)"
            )
        part, *others = runs[rank]
        source_type, source = self._columns(name, part, weight_format, stored_type)
        sources = [source, *(self._columns(name, x, weight_format, stored_type)[1] for x in others)]
        source = source if not others else np.concatenate(sources, 1)
        weight = self._pack(
            name,
            weight_format,
            stored_type,
            (rows, sum(map(len, runs[rank]))),
            lambda start, stop: (source_type, source[start:stop]),
            part,
        )
        if not others:
            self._report(weight, module, columns, part)
        return weight

    def packed_together(self, rows: Sequence[Rows], columns: int) -> list[PackedWeight]:
        """Return rows of several modules that multiply the same activations.

        The activations have a single format. If one of the matrices is a float matrix, all of them are packed as
        floats.
        """
        names = [f"{self._prefix}{each.name}.weight" for each in rows]
        formats = [self._format(name) for name in names]
        if len({weight_format.activation_kind for weight_format in formats}) > 1:
            floats = set(formats) & set(FLOAT_FORMATS.values())
            common = floats.pop() if len(floats) == 1 else FLOAT_FORMATS[self.dtype_name]
            formats = [common] * len(rows)
        weights = [
            self._packed(name, each.total, columns, weight_format, each.part, each.order)
            for name, each, weight_format in zip(names, rows, formats, strict=True)
        ]
        for weight, each in zip(weights, rows, strict=True):
            self._report(weight, each, columns)
        return weights

    def packed_head(
        self, vocab_size: int, hidden_size: int, part: range, num_unused: int = 0
    ) -> PackedWeight:
        """Return some rows of the output projection. Not for models in which it is the embedding."""
        rows = self.head_rows(vocab_size, num_unused)
        return self._packed(self._head, rows, hidden_size, self._format(self._head), part)

    def pack_tensor(self, name: str, matrix: torch.Tensor) -> PackedWeight:
        """Return a matrix that is part of the tensor `name`, packed like the checkpoint's float matrices."""
        weight_format = FLOAT_FORMATS[dtype_name(matrix.dtype)]
        if self._quantization is not None and matrix.shape[1] % GROUP_SIZE == 0:
            weight_format = self._quantization
        return self._packed_tensor(name, weight_format, matrix)

    def pack_float_tensor(self, name: str, matrix: torch.Tensor) -> PackedWeight:
        """Return a matrix computed from the tensor `name`, packed as floats."""
        return self._packed_tensor(name, FLOAT_FORMATS[dtype_name(matrix.dtype)], matrix)

    def _packed_tensor(
        self, name: str, weight_format: WeightFormat, matrix: torch.Tensor
    ) -> PackedWeight:
        weight = pack_tensor(weight_format, matrix, self._memory)
        if weight is None:
            raise self._error(_DAMAGED.format(name=repr(name)))
        return weight

    def _report(
        self, weight: PackedWeight, rows: Rows, num_columns: int, columns: range | None = None
    ) -> None:
        if self._on_matrix is not None:
            self._on_matrix(weight, rows, num_columns, columns)

    def _packed(
        self,
        name: str,
        rows: int,
        columns: int,
        weight_format: WeightFormat,
        part: range | None,
        order: torch.Tensor | None = None,
    ) -> PackedWeight:
        self._check(name, (rows, columns))
        part = part or range(rows)
        stored_type = self._packable_type(name, weight_format)

        def read(start: int, stop: int) -> tuple[int, NDArray[np.uint8]]:
            if order is None:
                return self._rows(name, part[start:stop], weight_format, stored_type)
            index = order[start:stop].numpy()
            first, last = int(index.min()), int(index.max())
            source_type, source = self._rows(
                name, part[first : last + 1], weight_format, stored_type
            )
            return source_type, np.ascontiguousarray(source[index - first])

        num_rows = len(part) if order is None else len(order)
        return self._pack(name, weight_format, stored_type, (num_rows, columns), read)

    def _pack(
        self,
        name: str,
        weight_format: WeightFormat,
        stored_type: SourceType | None,
        shape: tuple[int, int],
        rows: RowSource,
        part: range | None = None,
    ) -> PackedWeight:
        """Return a matrix of the rows that `rows` returns. `part` is the range of columns; None for all."""
        num_rows, columns = shape
        group, scale = self._scaling(name, weight_format, part or range(columns))
        file = self._packed_file
        description = (name, int(weight_format), num_rows, columns, group, scale)
        if file is not None and (found := file.take(description)) is not None:
            weight = PackedWeight(weight_format, num_rows, columns, found, group, scale)
        else:
            weight = allocate_packed(weight_format, num_rows, columns, self._memory, group, scale)
            self._pack_rows(name, weight, rows)
            if file is not None:
                file.keep(description, weight)
        if stored_type is not None:
            elements, size = BLOCK_SIZES[stored_type]
            self.checkpoint.bytes_read += num_rows * columns // elements * size
        self._mark_read(name)
        return weight

    def _pack_rows(self, name: str, weight: PackedWeight, rows: RowSource) -> None:
        """Pack the rows that `rows` returns for each range. Threads may be busy with it afterwards."""
        most_rows = max(1, min(_ELEMENTS_AT_ONCE // weight.k, weight.n // self._num_threads))
        step = round_up(most_rows, _ROWS_TOGETHER)

        def pack(start: int) -> None:
            source_type, source = rows(start, min(start + step, weight.n))
            if not pack_rows(weight, source_type, source, start):
                raise self._error(_DAMAGED.format(name=repr(name)))

        tasks = [self._threads.submit(pack, start) for start in range(0, weight.n, step)]
        if weight.format == WeightFormat.BF16:
            # Its size depends on its elements, and the next matrix is stored behind it.
            for task in tasks:
                task.result()
            weight.array = self._memory.shrink(finish_packing(weight), weight.array)
        else:
            self._packing += tasks

    def _scaling(self, name: str, weight_format: WeightFormat, part: range) -> tuple[int, float]:
        """Return how many of these columns share a scale in F8, and the scale of the whole matrix in NVFP4."""
        if weight_format not in (WeightFormat.F8, WeightFormat.NVFP4):
            return 0, 1.0
        few = self._few_rows(name)
        assert few is not None
        if few.scale_OG.shape[1] == 1:
            return len(part), few.factor
        group_size = ColumnGroups.from_part(part, few.group_size, few.shape[1]).size
        if weight_format is WeightFormat.F8 and group_size % 2 and group_size < len(part):
            raise NotSupportedNatively(
                f"{name!r} has a scale for every {group_size} columns, which is not an even number"
            )
        return group_size, few.factor

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = super()._shape(name)
        return shape[::-1] if self._is_stored_transposed(name) else shape

    def _format(self, name: str) -> WeightFormat:
        is_quantized_gguf = False
        if isinstance(self.checkpoint, GGUFCheckpoint):
            source_type = self.checkpoint.ggml_type(self._stored_name(name))
            if source_type in QUANTIZED_FORMATS:
                return QUANTIZED_FORMATS[source_type]
            is_quantized_gguf = source_type not in FLOAT_TYPES.values()
        few = self._few_rows(name)
        if few is not None:
            # Imported here, because it needs torch.
            from ..loaders.quantization.float8 import is_float8

            if (stored_as := _block_type(few)) is not None:
                return QUANTIZED_FORMATS[stored_as]
            if self._quantization is None and is_float8(few):
                return WeightFormat.F8
        if is_quantized_gguf:
            return WeightFormat.U8
        if self._quantization is None or self._shape(name)[1] % GROUP_SIZE:
            is_half = self._keeps_float16 and self._stored_dtype(name) == "float16"
            return WeightFormat.F16 if is_half else FLOAT_FORMATS[self.dtype_name]
        if name == self._head or name.endswith(_EMBEDDINGS):
            return WeightFormat.U8
        return self._quantization

    def _few_rows(self, name: str) -> QuantizedMatrix | None:
        """Return the first rows of a quantized matrix, which determine its format, or None."""
        if self._is_stored_transposed(name):
            return None
        return self.checkpoint.quantized(
            self._stored_name(name), part=range(min(8, self._shape(name)[0]))
        )

    def _stored_dtype(self, name: str) -> str:
        """Return the name of a stored matrix's dtype, such as "bfloat16". The matrix must not be quantized."""
        floats = self.checkpoint.floats(self._stored_name(name), part=range(1))
        if floats is not None:
            return floats.dtype
        return dtype_name(self.checkpoint.tensor(self._stored_name(name), part=range(1)).dtype)

    def _packable_type(self, name: str, weight_format: WeightFormat) -> SourceType | None:
        """Return the type in which a tensor is stored if it can be packed directly, else None."""
        if isinstance(self.checkpoint, GGUFCheckpoint):
            stored_type = self.checkpoint.ggml_type(self._stored_name(name))
            if can_pack(stored_type, weight_format):
                return stored_type
        return None

    def _rows(
        self,
        name: str,
        part: range,
        weight_format: WeightFormat,
        stored_type: SourceType | None,
    ) -> tuple[int, NDArray[np.uint8]]:
        """Return rows of a tensor in a packable type, uint8 ``[rows, row bytes]``."""
        if stored_type is not None and isinstance(self.checkpoint, GGUFCheckpoint):
            return stored_type, self.checkpoint.raw(self._stored_name(name), part)
        return self._other(name, weight_format, part, 0)

    def _columns(
        self, name: str, part: range, weight_format: WeightFormat, stored_type: SourceType | None
    ) -> tuple[int, NDArray[np.uint8]]:
        """Return columns of a tensor in a packable type, uint8 ``[rows, bytes of the columns]``."""
        if stored_type is not None and isinstance(self.checkpoint, GGUFCheckpoint):
            elements, size = BLOCK_SIZES[stored_type]
            start, stop = (bound // elements * size for bound in (part.start, part.stop))
            return stored_type, self.checkpoint.raw(self._stored_name(name))[:, start:stop]
        return self._other(name, weight_format, part, 1)

    def _other(
        self, name: str, weight_format: WeightFormat, part: range, dim: int
    ) -> tuple[int, NDArray[np.uint8]]:
        """Return rows or columns of a tensor, converted to a packable type."""
        if self._is_stored_transposed(name):
            floats = self.checkpoint.floats(self._stored_name(name), part=part, dim=1 - dim)
            if floats is not None:
                return _packable(Floats(floats.values.T, floats.dtype))
            stored = self.checkpoint.tensor(self._stored_name(name), part=part, dim=1 - dim)
            return as_source(stored.T)
        floats = self.checkpoint.floats(self._stored_name(name), part=part, dim=dim)
        if floats is not None:
            return _packable(floats)
        if matrix := self.checkpoint.quantized(self._stored_name(name), part=part, dim=dim):
            from ..loaders.quantization.float8 import as_float8_rows
            from ..loaders.quantization.gguf_blocks import as_blocks, fits_block_scales

            if weight_format is WeightFormat.F8:
                return FLOAT8_ROWS, as_float8_rows(matrix)
            stored_as = _block_type(matrix)
            if stored_as is not None and can_pack(stored_as, weight_format):
                if not fits_block_scales(matrix):
                    raise NotSupportedNatively(
                        f"the scales of {name!r} are too large for the native backend (float16)"
                    )
                return stored_as, as_blocks(matrix)
        return as_source(self.checkpoint.tensor(self._stored_name(name), part=part, dim=dim))


def _block_type(matrix: QuantizedMatrix) -> SourceType | None:
    """Return the GGUF type that can represent a matrix, or None."""
    # Imported here, because it needs torch.
    from ..loaders.quantization.gguf_blocks import block_type

    return block_type(matrix)


def _packable(floats: Floats) -> tuple[SourceType, NDArray[np.uint8]]:
    """Return a float matrix in a packable type, uint8 ``[rows, row bytes]``."""
    values = np.ascontiguousarray(floats.values)
    return FLOAT_TYPES[floats.dtype], values.view(np.uint8)


def intermediate_shares(size: int, tensor_parallel: TensorParallel) -> list[range]:
    """Return each rank's range of the `size` intermediate elements of an MLP or an expert.

    The ranges consist of whole blocks of stored weights, if every rank can have at least one block.
    """
    for unit in (_LARGEST_BLOCK, GROUP_SIZE):
        if size % unit == 0 and size // unit >= tensor_parallel.size:
            shares = tensor_parallel.parts(size // unit)
            return [range(share.start * unit, share.stop * unit) for share in shares]
    return tensor_parallel.parts(size)
