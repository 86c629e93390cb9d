"""Convert numbers to the two 8-bit floating-point types of vLLM's `embed_dtype`."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt


def _values(mantissa_bits: int, bias: int) -> npt.NDArray[np.float64]:
    """Return the values float64[128] of the codes without a sign, as if none stood for infinity or NaN."""
    codes = np.arange(128)
    exponents, mantissas = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    is_normal = exponents > 0
    significands = is_normal + mantissas / (1 << mantissa_bits)
    return np.asarray(significands * 2.0 ** (np.maximum(exponents, 1) - bias))


FLOAT8_TYPES: Final[dict[str, tuple[npt.NDArray[np.float64], int]]] = {
    "fp8_e4m3": (_values(3, 7), 0x7E),
    "fp8_e5m2": (_values(2, 15), 0x7C),
}
"""Name -> the values of the codes, and the code of numbers that are too large, as in PyTorch: 448 or infinity."""


def to_float8(numbers: npt.NDArray[Any], name: str) -> npt.NDArray[np.uint8]:
    """Return the code of the nearest value of each finite number, and the even code between two (OCP 8-bit floats)."""
    values, too_large = FLOAT8_TYPES[name]
    sizes = np.abs(numbers.astype(np.float64))
    above = np.minimum(np.searchsorted(values, sizes), too_large)
    below = np.maximum(above - 1, 0)
    to_above, to_below = values[above] - sizes, sizes - values[below]
    is_below = (to_below < to_above) | ((to_below == to_above) & (below % 2 == 0))
    codes = np.where(is_below, below, above)
    return (codes | np.where(np.signbit(numbers), 0x80, 0)).astype(np.uint8)
