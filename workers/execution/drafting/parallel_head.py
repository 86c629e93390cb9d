"""A head that computes all drafts of a request in one pass: P-EAGLE.

The first draft follows from the last known token, as in EAGLE-3. For each further draft, the pass has a position with a
mask token and stored hidden states, in place of the previous draft and of the model's hidden states.

Shapes: S slots of a step, T tokens, R drafts, D hidden size.
"""

from __future__ import annotations

import numpy as np
import torch

from ....protocol.arrays import Int64Array, offsets_in_runs
from ...cpu.drafts import Drafts
from ...device.dtypes import on_host
from ...device.transfers import to_device
from .computed import ComputedRows
from .draft_head import DraftHead


class ParallelHead(DraftHead):
    """A head that computes all drafts in one pass. With tensor parallelism, each rank has the whole head."""

    @torch.inference_mode()
    def propose(self, computed: ComputedRows, drafts: Drafts, *, samples: bool) -> int:
        """Run the head for the tokens of a step, and write drafts for the slots that may have drafts.

        Return the number of passes through the head. If `samples` is false, nothing was sampled and no drafts are
        written.
        """
        rows = self._known_rows(computed)
        if not len(rows.slots_S):
            return 0
        assert computed.hidden_TE is not None
        limits_S = self._limits(drafts, rows.slots_S).astype(np.int64)
        limits_S = np.maximum(limits_S, 0) if samples else np.zeros_like(limits_S)
        num_masks_S = np.maximum(limits_S - 1, 0)
        counts_S = rows.counts_S + num_masks_S
        ends_S = np.cumsum(counts_S)
        numbers_T = np.arange(ends_S[-1]) - np.repeat(ends_S - counts_S, counts_S)
        is_known_T = numbers_T < np.repeat(rows.counts_S, counts_S)
        sources_T = np.where(is_known_T, np.repeat(rows.rows_S, counts_S) + numbers_T, 0)
        hidden_TD = self.fusion.read_target(computed.hidden_TE[to_device(sources_T, self._device)])
        hidden_TD[to_device(~is_known_T, self._device)] = self.fusion.read_mask()
        tokens = self._batch.host_token_ids_NL
        lengths_S = self._num_tokens[rows.slots_S].astype(np.int64)
        slots, columns, _ = _following(rows.slots_S, lengths_S, num_masks_S)
        tokens[slots, columns] = self._layout.mask_token_id
        outputs_TE = self.run(rows.slots_S, rows.begins_S, counts_S, hidden_TD)
        if not limits_S.any():
            return 0
        slots, columns, numbers = _following(rows.slots_S, lengths_S, limits_S)
        last = np.repeat(ends_S - num_masks_S - 1, limits_S)
        outputs_RE = outputs_TE[to_device(last + numbers, self._device)]
        chosen_R = self.choose(outputs_RE, slots.astype(np.int32), columns.astype(np.int32))
        tokens[slots, columns] = on_host(chosen_R)
        has_drafts_S = limits_S > 0
        drafts.add_found(rows.slots_S[has_drafts_S], limits_S[has_drafts_S].astype(np.int32))
        return 1


def _following(
    slots_S: Int64Array, lengths_S: Int64Array, counts_S: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return the slots, the columns and the numbers of `counts_S` places after the tokens of each slot."""
    numbers_R = offsets_in_runs(counts_S)
    return np.repeat(slots_S, counts_S), np.repeat(lengths_S, counts_S) + numbers_R, numbers_R
