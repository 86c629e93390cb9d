"""Parse files with one tensor that clients send: safetensors (https://huggingface.co/docs/safetensors) and npy."""

from __future__ import annotations

import ast
import base64
import binascii
import json
import math
from typing import Any, Final

from ..client.encoder_inputs import DTYPES, Embeddings
from ..http.shown_values import echo

MAX_HEADER_BYTES: Final = 1 << 16
"""Maximum size of a file's header."""

_NPY: Final = b"\x93NUMPY"
_DTYPES: Final = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "<f4": "float32",
    "<f2": "float16",
}
"""Name of a number type in safetensors and npy files -> dtype."""


class NotATensorFile(Exception):
    """Raised for a text that is not such a file. The message follows the name of the field."""


def read_tensor_file(text: str) -> Embeddings:
    """Return the only tensor of a file in base64, which may be a data URL.

    Raises:
        NotATensorFile: The text is something else.
    """
    try:
        data = base64.b64decode(text.rpartition(",")[2], validate=True)
    except (ValueError, binascii.Error) as error:
        raise NotATensorFile(f"is not valid base64: {error}") from None
    try:
        return _read(data)
    except (
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        SyntaxError,
        RecursionError,
        MemoryError,
    ) as error:
        raise NotATensorFile(
            f"is not a safetensors or npy file with one tensor: {echo(str(error))}; send such a file in base64"
        ) from None


def _read(data: bytes) -> Embeddings:
    kind, shape, content = _npy(data) if data.startswith(_NPY) else _safetensors(data)
    if kind not in _DTYPES:
        raise ValueError(f"its type is {kind}, not F32, F16 or BF16")
    if not isinstance(shape, list | tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"its shape {shape} is not a list of sizes")
    dtype = _DTYPES[kind]
    if len(content) != math.prod(shape) * DTYPES[dtype]:
        raise ValueError(f"it has {len(content)} bytes, which do not match the shape {list(shape)}")
    return Embeddings(dtype, tuple(shape), content)


def _safetensors(data: bytes) -> tuple[str, Any, bytes]:
    """Return the type, the shape and the bytes of the only tensor of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise ValueError("its header is too long")
    header = json.loads(data[8 : 8 + length])
    tensors = [value for name, value in header.items() if name != "__metadata__"]
    if len(tensors) != 1:
        raise ValueError(f"it has {len(tensors)} tensors instead of one")
    start, end = tensors[0]["data_offsets"]
    if start < 0:
        raise ValueError(f"its tensor begins at the negative offset {start}")
    return str(tensors[0]["dtype"]), tensors[0]["shape"], data[8 + length :][start:end]


def _npy(data: bytes) -> tuple[str, Any, bytes]:
    """Return the type, the shape and the bytes of an npy file."""
    first = 10 if data[6] == 1 else 12
    length = int.from_bytes(data[8:first], "little")
    if length > min(MAX_HEADER_BYTES, len(data) - first):
        raise ValueError("its header is too long")
    header = ast.literal_eval(data[first : first + length].decode("latin-1").strip())
    if header["fortran_order"]:
        raise ValueError("it is stored in Fortran order; save it in C order")
    return str(header["descr"]), header["shape"], data[first + length :]
