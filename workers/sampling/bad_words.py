"""Bad words: token sequences that must not be completed in the output.

Shapes: N slots, T tail length, W words, B rows with bad words, S rows of the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import torch

from ...protocol.arrays import Int32Array, Int64Array
from ..device.transfers import to_device

_ANY = -1


class BadWordRows(msgspec.Struct):
    """The bad words of a batch, on the device.

    `prefixes_WT` int64 has all tokens of each word except the last, aligned right and padded with `_ANY`; `last_W` has
    the last tokens. `rows_W` and `slots_W` are the row and slot of each word. `tail_rows_B` and `tail_slots_B` are the
    rows and slots that have any words.
    """

    prefixes_WT: torch.Tensor
    last_W: torch.Tensor
    rows_W: torch.Tensor
    slots_W: torch.Tensor
    tail_rows_B: torch.Tensor
    tail_slots_B: torch.Tensor


Words = tuple[tuple[int, ...], ...]


class BadWords:
    """The last output tokens of each slot, which are compared with the prefixes of the slot's bad words."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._tails_NT = torch.full((num_slots, 0), _ANY, dtype=torch.int64, device=device)

    def add_slot(self, slot: int, words: Words, output_token_ids: Int32Array) -> None:
        """Set a slot's words and last output tokens."""
        length = self._tails_NT.shape[1]
        missing = max(len(word) for word in words) - 1 - length
        if missing > 0:
            # A longer tail has no earlier tokens for these slots, but none of their words is that long.
            self._tails_NT = torch.nn.functional.pad(self._tails_NT, (missing, 0), value=_ANY)
            length += missing
        self._tails_NT[slot] = _ANY
        tail = output_token_ids[max(0, len(output_token_ids) - length) :].astype(np.int64)
        if len(tail):
            self._tails_NT[slot, -len(tail) :] = to_device(tail, self._device)

    def rows(self, words_of: Mapping[int, Words], slots_S: Int64Array) -> BadWordRows | None:
        """Return the bad words of a batch of slots, or None if there are none."""
        tail_rows = [row for row, slot in enumerate(slots_S.tolist()) if slot in words_of]
        if not tail_rows:
            return None
        words = [(row, word) for row in tail_rows for word in words_of[int(slots_S[row])]]
        prefixes_WT = np.full((len(words), self._tails_NT.shape[1]), _ANY, np.int64)
        for w, (_, word) in enumerate(words):
            if len(word) > 1:
                prefixes_WT[w, 1 - len(word) :] = word[:-1]
        rows_W = np.array([row for row, _ in words], np.int64)
        last_W = np.array([word[-1] for _, word in words], np.int64)
        tail_rows_B = np.array(tail_rows, np.int64)
        return BadWordRows(
            *(
                to_device(array, self._device)
                for array in (
                    prefixes_WT,
                    last_W,
                    rows_W,
                    slots_S[rows_W],
                    tail_rows_B,
                    slots_S[tail_rows_B],
                )
            )
        )

    def mask(self, logits_SV: torch.Tensor, rows: BadWordRows) -> None:
        """Mask, in place, every token that would complete a word."""
        tails_WT = self._tails_NT[rows.slots_W]
        prefixes_WT = rows.prefixes_WT
        matches_W = ((prefixes_WT == tails_WT) | (prefixes_WT == _ANY)).all(1)
        limit_W = torch.where(matches_W, float("-inf"), float("inf"))
        index_W = rows.rows_W * logits_SV.shape[1] + rows.last_W
        logits_SV.view(-1).scatter_reduce_(0, index_W, limit_W, "amin")

    def append_sampled(self, rows: BadWordRows, token_ids_S: torch.Tensor) -> None:
        """Append the token that each row has just sampled."""
        if not self._tails_NT.shape[1]:
            return
        tails_BT = self._tails_NT[rows.tail_slots_B].roll(-1, 1)
        tails_BT[:, -1] = token_ids_S[rows.tail_rows_B]
        self._tails_NT[rows.tail_slots_B] = tails_BT
