"""Weights of bitsandbytes: 4-bit floats (NF4, FP4) and 8-bit integers.

O output and D input features. With 4 bits (Dettmers et al., "QLoRA", arXiv 2305.14314), `weight` uint8 [O * D / 2, 1]
has the codes of the flattened matrix, the first of a byte in its high bits. A code is an index into
`weight.quant_map` float32 [16]. Blocks of neighbors share a factor in `weight.absmax` float32 [blocks]. If factors
are quantized themselves, `weight.absmax` is uint8: indices into `weight.nested_quant_map` float32 [256], whose values
are multiplied by one of `weight.nested_absmax` per nested block, and added to an offset. The tensor
`weight.quant_state.bitsandbytes__nf4` (or `__fp4`) has the shape, the sizes of blocks and the offset as JSON.

With 8 bits (Dettmers et al., "LLM.int8()", arXiv 2208.07339), `weight` is int8 [O, D], and `SCB` float32 [O] has the
largest magnitude of each row, which 127 stands for.
"""

from __future__ import annotations

import json

import msgspec
import torch
from torch import Tensor

from ....protocol.checkpoint.config_fields import ConfigFields
from .matrix import QuantizedMatrix
from .scheme import QuantizationScheme, StoredModule, UnsupportedScheme, covering, shape_of

_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def bitsandbytes_scheme(config: ConfigFields) -> QuantizationScheme:
    """Return the scheme of a config. Raise `UnsupportedScheme` if it has neither 4 nor 8 bits, or other storage."""
    if config.get("load_in_8bit") or config.get("_load_in_8bit"):
        return RowIntegerScheme()
    if not (config.get("load_in_4bit") or config.get("_load_in_4bit")):
        raise UnsupportedScheme("bitsandbytes without load_in_4bit or load_in_8bit")
    if (storage := config.get("bnb_4bit_quant_storage") or "uint8") != "uint8":
        raise UnsupportedScheme(f"bitsandbytes with bnb_4bit_quant_storage {storage!r}")
    return CodebookScheme()


class RowIntegerScheme(QuantizationScheme):
    """The scheme of 8-bit integers with a scale per row."""

    marker = "weight"
    marker_dtypes = frozenset({"I8"})
    companions = frozenset({"SCB", "weight_format"})

    def matrix_shape(self, module: StoredModule) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of the matrix, (O, D)."""
        return shape_of(module, "weight")

    def matrix(self, module: StoredModule, rows: range, columns: range) -> QuantizedMatrix:
        """Read these rows and columns of a module's matrix."""
        shape = self.matrix_shape(module)
        # Other layouts than 0 are those of certain GPUs, which old versions could write.
        if module.has("weight_format") and int(layout := module.load("weight_format")):
            raise module.problem(f"'{module.name}.weight_format' is {int(layout)}, expected 0")
        values_OD = module.read("weight", shape, rows, columns).view(torch.uint8) ^ 128
        scale_O = module.read("SCB", shape[:1], rows).float() / 127
        return QuantizedMatrix(values_OD, 8, scale_O.unsqueeze(1), len(columns), zero_OG=128)


class _State(msgspec.Struct, frozen=True):
    """The part of a module's JSON that its values depend on."""

    shape: tuple[int, int]
    blocksize: int
    dtype: torch.dtype
    nested_blocksize: int
    nested_offset: float


class CodebookScheme(QuantizationScheme):
    """The scheme of 4-bit codes. Matrices are read as floats with the values that bitsandbytes multiplies by."""

    marker = "weight"
    marker_dtypes = frozenset({"U8"})
    companions = frozenset(
        {
            "weight.absmax",
            "weight.quant_map",
            "weight.nested_absmax",
            "weight.nested_quant_map",
            *_STATES,
        }
    )

    def matrix_shape(self, module: StoredModule) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of the matrix, (O, D)."""
        return _state_of(module).shape

    def matrix(self, module: StoredModule, rows: range, columns: range) -> QuantizedMatrix:
        """Read these rows of a module's matrix, and return these columns of them."""
        state = _state_of(module)
        num_rows, num_columns = state.shape
        count = num_rows * num_columns
        part = range(rows.start * num_columns, rows.stop * num_columns)
        packed = module.read("weight", (-(-count // 2), 1), covering(part, 2)).flatten()
        codes = torch.stack((packed >> 4, packed & 15), 1).flatten()
        codes = codes[part.start % 2 :][: len(part)]
        blocks = covering(part, state.blocksize)
        absmax = _absmax(module, state, -(-count // state.blocksize), blocks)
        first = part.start - blocks.start * state.blocksize
        factors = absmax.repeat_interleave(state.blocksize)[first : first + len(part)]
        values = module.read("weight.quant_map", (16,)).float()[codes.long()] * factors
        values_OD = values.to(state.dtype).view(len(rows), num_columns)
        values_OD = values_OD[:, columns.start : columns.stop].float().contiguous()
        return QuantizedMatrix.dequantized(values_OD, "bitsandbytes in 4 bits")


def _absmax(module: StoredModule, state: _State, num_blocks: int, blocks: range) -> Tensor:
    """Return the factors of these blocks, float32 [len(blocks)]."""
    absmax = module.read("weight.absmax", (num_blocks,), blocks)
    if absmax.dtype != torch.uint8:
        return absmax.float()
    size = state.nested_blocksize
    nested = module.read(
        "weight.nested_absmax", (-(-num_blocks // size),), covering(blocks, size)
    ).float()
    first = blocks.start % size
    factors = nested.repeat_interleave(size)[first : first + len(blocks)]
    codebook = module.read("weight.nested_quant_map", (256,)).float()
    return codebook[absmax.long()] * factors + state.nested_offset


def _state_of(module: StoredModule) -> _State:
    name = next(filter(module.has, _STATES), _STATES[0])
    if not module.has(name):
        raise module.problem(f"the tensor '{module.name}.{name}' is missing")
    try:
        fields = json.loads(bytes(module.load(name).tolist()))
        rows, columns = fields["shape"]
        state = _State(
            (int(rows), int(columns)),
            int(fields["blocksize"]),
            _DTYPES[fields["dtype"]],
            int(fields.get("nested_blocksize", 256)),
            float(fields.get("nested_offset", 0)),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise module.problem(
            f"the tensor '{module.name}.{name}' does not describe a matrix: {error!r}"
        ) from None
    if min(*state.shape, state.blocksize, state.nested_blocksize) < 1:
        raise module.problem(
            f"the tensor '{module.name}.{name}' has shape {list(state.shape)} and blocks of "
            f"{state.blocksize} and {state.nested_blocksize}; expected positive numbers"
        )
    return state
