"""Repetition, presence and frequency penalties.

They apply only to tokens that a row contains. So each row stores its tokens instead of counts for the whole vocabulary.

Shapes: N slots, L entries in a slot, P rows with penalties, S rows of the batch, V vocabulary.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
import torch.nn.functional as F

from ...protocol.arrays import Int32Array, Int64Array
from ..device.transfers import to_device

_INITIAL_ENTRIES = 512


class PenaltyRows(msgspec.Struct):
    """The rows of a batch that have penalties.

    All but `host_slots_P` is on the device. Strengths are float32 [P, 1].
    """

    host_slots_P: Int64Array
    rows_P: torch.Tensor
    slots_P: torch.Tensor
    repetition_P1: torch.Tensor
    presence_P1: torch.Tensor
    frequency_P1: torch.Tensor


class SeenTokens:
    """The tokens of each slot's prompt and output, with the number of occurrences of each in the output.

    A token may have several entries, with equal counts.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._ids_NL = torch.zeros((num_slots, 0), dtype=torch.int64, device=device)
        self._counts_NL = torch.zeros((num_slots, 0), dtype=torch.float32, device=device)
        self._num_entries_N = np.zeros(num_slots, np.int64)

    def add_slot(
        self, slot: int, prompt_token_ids: Int32Array, output_token_ids: Int32Array
    ) -> None:
        """Set a slot's tokens, at least one."""
        tokens = np.concatenate([prompt_token_ids, output_token_ids])
        in_output = np.arange(len(tokens)) >= len(prompt_token_ids)
        ids, entry = np.unique(tokens, return_inverse=True)
        counts = np.bincount(entry, weights=in_output).astype(np.float32)
        self._reserve(len(ids))
        self._ids_NL[slot, : len(ids)] = to_device(ids.astype(np.int64), self._device)
        self._counts_NL[slot, : len(ids)] = to_device(counts, self._device)
        self._num_entries_N[slot] = len(ids)

    def penalize(self, logits_SV: torch.Tensor, rows: PenaltyRows) -> None:
        """Apply the penalties in place."""
        ids_PL, counts_PL = self._entries(rows)
        index = (rows.rows_P[:, None] * logits_SV.shape[1] + ids_PL).flatten()
        logits = logits_SV.view(-1)
        x_PL = logits[index].view_as(counts_PL)
        x_PL = torch.where(x_PL > 0, x_PL / rows.repetition_P1, x_PL * rows.repetition_P1)
        x_PL -= rows.frequency_P1 * counts_PL
        x_PL -= rows.presence_P1 * (counts_PL > 0)
        # Entries of the same token write equal values, so their order does not matter.
        logits.scatter_(0, index, x_PL.flatten())

    def append_sampled(self, rows: PenaltyRows, token_ids_S: torch.Tensor) -> None:
        """Append the token that each row has just sampled."""
        ids_PL, counts_PL = self._entries(rows)
        token_P = token_ids_S[rows.rows_P]
        is_same_PL = ids_PL == token_P[:, None]
        num_entries_P = self._num_entries_N[rows.host_slots_P]
        entry_P = to_device(num_entries_P, self._device)
        self._num_entries_N[rows.host_slots_P] = num_entries_P + 1
        self._reserve(ids_PL.shape[1] + 1)
        self._counts_NL[rows.slots_P, : ids_PL.shape[1]] = counts_PL + is_same_PL
        self._ids_NL[rows.slots_P, entry_P] = token_P
        self._counts_NL[rows.slots_P, entry_P] = (counts_PL * is_same_PL).amax(1) + 1

    def _entries(self, rows: PenaltyRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and counts as [P, L]; a shorter row is padded with its first entry."""
        num_entries_P = self._num_entries_N[rows.host_slots_P]
        column_L = torch.arange(int(num_entries_P.max()), device=self._device)
        last_P1 = to_device(num_entries_P - 1, self._device)[:, None]
        column_PL = torch.where(column_L <= last_P1, column_L, 0)
        slots_P1 = rows.slots_P[:, None]
        return self._ids_NL[slots_P1, column_PL], self._counts_NL[slots_P1, column_PL]

    def _reserve(self, num_entries: int) -> None:
        capacity = self._ids_NL.shape[1]
        if num_entries > capacity:
            missing = max(_INITIAL_ENTRIES, 2 * capacity, num_entries) - capacity
            self._ids_NL = F.pad(self._ids_NL, (0, missing))
            self._counts_NL = F.pad(self._counts_NL, (0, missing))
