"""The rules of speech transcripts: suppressed tokens, and timestamps that come in pairs and in the order of time.

The rules are Whisper's (arXiv 2212.04356). A row's changes depend only on its own output and logits.

Shapes: N slots, R rows with rules, S rows of the batch, V vocabulary; E entries, pairs of row and token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
import torch

from ...protocol.arrays import Int32Array, Int64Array
from ..device.transfers import to_device
from .state import TranscriptState

_NONE: Final = -1


class TranscriptRows(msgspec.Struct):
    """The rules of a batch, on the device, int64. Index arrays are flat indices into [S, V].

    `begin_rows_E` are the rows, among those with rules, that `begin_index_E` belong to. Without timestamps,
    `first_timestamp_R` is V + 1. The first timestamp of a row must be at most `last_initial_R`.
    """

    has_timestamps: bool
    rows_R: torch.Tensor
    slots_R: torch.Tensor
    suppressed_index_E: torch.Tensor
    begin_index_E: torch.Tensor
    begin_rows_E: torch.Tensor
    first_timestamp_R: torch.Tensor
    end_token_R: torch.Tensor
    last_initial_R: torch.Tensor


class Transcripts:
    """The last two output tokens of each slot, and its last timestamp."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        # Per slot: the last token, the one before it, and the last timestamp.
        self._seen_3N = torch.full((3, num_slots), _NONE, dtype=torch.int64, device=device)

    def add_slot(
        self, slot: int, transcript: TranscriptState, output_token_ids: Int32Array
    ) -> None:
        """Set the output so far of a slot."""
        first = transcript.rules.first_timestamp_id
        times = output_token_ids[output_token_ids >= first] if first else output_token_ids[:0]
        ends = [
            int(tokens[-place]) if len(tokens) >= place else _NONE
            for tokens, place in ((output_token_ids, 1), (output_token_ids, 2), (times, 1))
        ]
        self._seen_3N[:, slot] = to_device(np.array(ends, np.int64), self._device)

    def rows(
        self, transcripts: Mapping[int, TranscriptState], slots_S: Int64Array
    ) -> TranscriptRows | None:
        """Return the rules of a batch of slots, or None if there are none."""
        if not transcripts:
            return None
        rows = [row for row, slot in enumerate(slots_S.tolist()) if slot in transcripts]
        if not rows:
            return None
        of_rows = [transcripts[int(slots_S[row])] for row in rows]
        size = self._vocab_size
        first = np.array([each.rules.first_timestamp_id or size + 1 for each in of_rows], np.int64)
        limits = [each.rules.max_initial_timestamp for each in of_rows]
        last = np.array([size if x < 0 else t + x for t, x in zip(first, limits, strict=True)])

        def index(tokens: list[Int32Array]) -> Int64Array:
            parts = [
                row * size + ids.astype(np.int64) for row, ids in zip(rows, tokens, strict=True)
            ]
            return np.concatenate(parts)

        begin = [each.begin_suppressed for each in of_rows]
        arrays = (
            np.array(rows, np.int64),
            slots_S[rows],
            index([each.suppressed for each in of_rows]),
            index(begin),
            np.repeat(np.arange(len(rows)), [len(ids) for ids in begin]),
            first,
            np.array([each.rules.end_token_id for each in of_rows], np.int64),
            last.astype(np.int64),
        )
        on_device = (to_device(array, self._device) for array in arrays)
        return TranscriptRows(bool((first < size).any()), *on_device)

    def mask(self, logits_SV: torch.Tensor, rows: TranscriptRows) -> None:
        """Set the logits of all tokens that the rules forbid to -inf, in place."""
        flat = logits_SV.view(-1)
        flat.index_fill_(0, rows.suppressed_index_E, -torch.inf)
        last_R, previous_R, highest_R = self._seen_3N[:, rows.slots_R]
        is_first_E = (last_R == _NONE)[rows.begin_rows_E]
        kept_E = flat[rows.begin_index_E]
        flat[rows.begin_index_E] = kept_E.masked_fill_(is_first_E, -torch.inf)
        if not rows.has_timestamps:
            return
        logits_RV = logits_SV[rows.rows_R]
        first_R = rows.first_timestamp_R
        ids_V = torch.arange(self._vocab_size, device=logits_SV.device)
        is_time_RV = ids_V >= first_R[:, None]
        ends_in_time_R = last_R >= first_R
        ends_in_pair_R = ends_in_time_R & ((previous_R == _NONE) | (previous_R >= first_R))
        is_open_R = ends_in_time_R & ~ends_in_pair_R
        forbidden_RV = ids_V == first_R[:, None] - 1
        forbidden_RV |= is_time_RV & ends_in_pair_R[:, None]
        forbidden_RV |= (ids_V < rows.end_token_R[:, None]) & is_open_R[:, None]
        # If there was no timestamp yet, no timestamp is below the lowest one.
        lowest_R = highest_R + (~is_open_R).long()
        forbidden_RV |= is_time_RV & (ids_V < lowest_R[:, None])
        is_outside_RV = ~is_time_RV | (ids_V > rows.last_initial_R[:, None])
        is_begin_R = (last_R == _NONE) & (first_R < self._vocab_size)
        forbidden_RV |= is_outside_RV & is_begin_R[:, None]
        logits_RV.masked_fill_(forbidden_RV, -torch.inf)
        time_R = logits_RV.masked_fill(~is_time_RV, -torch.inf).double().logsumexp(1)
        text_R = logits_RV.masked_fill(is_time_RV, -torch.inf).amax(1)
        is_time_R = time_R > text_R.double()
        logits_RV.masked_fill_(~is_time_RV & is_time_R[:, None], -torch.inf)
        logits_SV[rows.rows_R] = logits_RV

    def append_sampled(self, rows: TranscriptRows, token_ids_S: torch.Tensor) -> None:
        """Append the sampled tokens of a batch to the outputs of its rows."""
        token_ids_R = token_ids_S[rows.rows_R].to(torch.int64)
        last_R, _, highest_R = self._seen_3N[:, rows.slots_R]
        is_time_R = token_ids_R >= rows.first_timestamp_R
        highest_R = torch.where(is_time_R, token_ids_R, highest_R)
        self._seen_3N[:, rows.slots_R] = torch.stack((token_ids_R, last_R, highest_R))
