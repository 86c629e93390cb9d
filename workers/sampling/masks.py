"""Masks of allowed tokens, from bitmasks: token t is bit t % 32 of word t // 32.

Shapes: G rows with a mask, K words of a bitmask, S rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from ...protocol.arrays import Int32Array

_BITS_OF_BYTE = torch.from_numpy(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(bool)
)


def pack_bitmask(token_ids: Iterable[int], vocab_size: int) -> Int32Array:
    """int32[ceil(vocab_size / 32)] with the bits of these tokens set."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[np.fromiter(token_ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def forbidden_tokens(bitmask_GK: Int32Array, vocab_size: int, device: torch.device) -> torch.Tensor:
    """bool[G, V] on the device, True where the token's bit is clear or missing."""
    table = _BITS_OF_BYTE.to(device)
    num_rows, num_words = bitmask_GK.shape
    bytes_G = torch.from_numpy(np.ascontiguousarray(bitmask_GK).view(np.uint8)).to(device)
    allowed = table.index_select(0, bytes_G.flatten().to(torch.int32))
    allowed = allowed.view(num_rows, num_words * 32)[:, :vocab_size]
    forbidden = torch.ones((num_rows, vocab_size), dtype=torch.bool, device=device)
    torch.logical_not(allowed, out=forbidden[:, : allowed.shape[1]])
    return forbidden


def forbid(logits_SV: torch.Tensor, rows_G: torch.Tensor, forbidden_GV: torch.Tensor) -> None:
    """Set the forbidden tokens of these rows to -inf, in place."""
    if len(rows_G) == len(logits_SV):
        # Every row has a mask, and then in order: rows are found in the order of the batch.
        logits_SV.masked_fill_(forbidden_GV, float("-inf"))
    else:
        logits_SV[rows_G] = logits_SV[rows_G].masked_fill_(forbidden_GV, float("-inf"))
