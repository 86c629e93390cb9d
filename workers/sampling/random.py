"""Counter-based random numbers, a pure function of seed, position and stream.

The generator is Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC
2011). Nothing is stored between draws, so a token's noise does not depend on the batch, the slot or a restart.

Shapes: S draws.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from ...protocol.arrays import Int64Array

Uint64Array = npt.NDArray[np.uint64]
Float64Array = npt.NDArray[np.float64]

_ROUNDS: Final = 10
_MULTIPLIERS: Final = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL: Final = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_KEY_STEPS: Final = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * _WEYL
_LOW: Final = np.uint64(0xFFFFFFFF)
_32: Final = np.uint64(32)


class Stream(IntEnum):
    """Independent random sequences for the same seed, one per purpose."""

    TOKEN = 0
    XTC = 1
    CANVAS = 2


def philox(counter: Uint64Array, key: Uint64Array) -> Uint64Array:
    """Return four random 32-bit words for each column, uint64 [4, S].

    Args:
        counter: 32-bit words, uint64 [4, S].
        key: 32-bit words, uint64 [2, S].
    """
    keys = (key + _KEY_STEPS) & _LOW
    even, odd = counter[0::2], counter[1::2]
    for round_key in keys:
        product = even * _MULTIPLIERS
        # Words 0 and 2 take the high half of each other's product, words 1 and 3 the low half.
        even = ((product >> _32)[::-1]) ^ odd ^ round_key
        odd = (product & _LOW)[::-1]
    return np.stack([even, odd], axis=1).reshape(4, -1)


def uniforms(seeds: Int64Array, positions: Int64Array, stream: Stream) -> Float64Array:
    """Return float64 [S] in [0, 1) with 53 random bits; `seeds` and `positions` are int64 [S]."""
    seed = seeds.view(np.uint64)
    position = positions.view(np.uint64)
    counter = np.empty((4, len(seed)), np.uint64)
    counter[0] = position & _LOW
    counter[1] = position >> _32
    counter[2] = int(stream)
    counter[3] = 0
    word = philox(counter, np.stack([seed & _LOW, seed >> _32]))
    bits = (word[0] << np.uint64(21)) | (word[1] >> np.uint64(11))
    fractions: Float64Array = np.ldexp(bits.astype(np.float64), -53)
    return fractions
