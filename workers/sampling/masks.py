"""Masks of allowed tokens from bitmasks, where token t is bit t % 32 of word t // 32.

Shapes: G rows with a mask, K words of a bitmask, S rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from ...protocol.arrays import Int32Array, Int64Array
from ..device.transfers import to_device

_BITS_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")


@cache
def _limits_of_byte(device: torch.device) -> torch.Tensor:
    """Return the limits of the eight tokens for each byte value, float32 [256, 8]."""
    return to_device(np.where(_BITS_OF_BYTE, np.inf, -np.inf).astype(np.float32), device)


def pack_bitmask(token_ids: Iterable[int], vocab_size: int) -> Int32Array:
    """Return a bitmask, int32 [ceil(vocab_size / 32)], in which the bits of these tokens are set."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[np.fromiter(token_ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def allows_only(bitmask_K: Int32Array, token_ids: Int64Array) -> bool:
    """Return whether a bitmask, int32 [K], allows no token besides these."""
    num_bits = len(bitmask_K) * 32
    return not (bitmask_K & ~pack_bitmask(token_ids[token_ids < num_bits], num_bits)).any()


def token_limits(bitmask_GK: Int32Array, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return float32 [G, V] on the device: inf where the token's bit is set, -inf where it is clear or missing.

    Taking the minimum with limits is about twenty times as fast as filling by a boolean mask.
    """
    num_rows, num_words = bitmask_GK.shape
    bytes_G = to_device(np.ascontiguousarray(bitmask_GK).view(np.uint8), device)
    limits = _limits_of_byte(device).index_select(0, bytes_G.flatten().to(torch.int32))
    limits_GV = limits.view(num_rows, num_words * 32)[:, :vocab_size]
    missing = vocab_size - limits_GV.shape[1]
    return F.pad(limits_GV, (0, missing), value=float("-inf")) if missing else limits_GV


def limit(logits_SV: torch.Tensor, rows_G: torch.Tensor, limits_GV: torch.Tensor) -> None:
    """Apply the limits to these rows, which are in batch order, in place."""
    if len(rows_G) == len(logits_SV):
        torch.minimum(logits_SV, limits_GV, out=logits_SV)
    else:
        logits_SV[rows_G] = torch.minimum(logits_SV[rows_G], limits_GV)
