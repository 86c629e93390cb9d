"""A head that proposes a block of drafts in one pass: DFlash (arXiv 2602.06036).

Each layer has keys and values of the known tokens, computed from the model's hidden states when the model computes the
tokens. To propose, the layers run once for a block: the last token, which the model has not computed yet, and a mask
token for each draft. The tokens of the block attend to all known tokens and to each other.

Shapes: S slots of a step, T tokens, D hidden size.
"""

from __future__ import annotations

import numpy as np
import torch

from ....protocol.arrays import Int64Array
from ...batch import even_requests, plan_chunks
from ...cpu.drafts import Drafts
from ...device.dtypes import on_host
from ...device.transfers import to_device
from .computed import ComputedRows
from .draft_head import DraftHead


class BlockHead(DraftHead):
    """A head that proposes a block of drafts in one pass. With tensor parallelism, each rank has the whole head."""

    @torch.inference_mode()
    def propose(self, computed: ComputedRows, drafts: Drafts, *, samples: bool) -> int:
        """Store the keys of a step's tokens, and write drafts for the slots that may have drafts.

        Return the number of passes through the head. If `samples` is false, nothing was sampled and no drafts are
        written.
        """
        self._store(computed)
        slots_S = computed.slots_S.astype(np.int64)
        wanted_S = self._limits(drafts, slots_S)
        if not samples or not (wanted_S > 0).any():
            return 0
        widths_S = self._widths(slots_S)
        limits_S = np.minimum(wanted_S, widths_S)
        drafts_S = limits_S > 0
        if not drafts_S.any():
            return 0
        slots_S, limits_S = slots_S[drafts_S], limits_S[drafts_S].astype(np.int32)
        self._draft_block(slots_S, limits_S.astype(np.int64), widths_S[drafts_S])
        drafts.add_found(slots_S, limits_S)
        return 1

    def _store(self, computed: ComputedRows) -> None:
        """Store the keys and values of the tokens of a step."""
        assert computed.hidden_TE is not None
        has_rows_S = computed.counts_S > 0
        slots_S, begins_S = computed.slots_S[has_rows_S], computed.begins_S[has_rows_S]
        counts_S = computed.counts_S[has_rows_S].astype(np.int64)
        offsets_T = np.arange(counts_S.sum()) - np.repeat(np.cumsum(counts_S) - counts_S, counts_S)
        rows_T = to_device(
            np.repeat(computed.rows_S[has_rows_S], counts_S) + offsets_T, self._device
        )
        plan = plan_chunks(slots_S, begins_S.astype(np.int64), counts_S)
        self._model.store_keys(
            self._fusion.read_context(computed.hidden_TE[rows_T]),
            to_device(plan.positions_T, self._device),
            self._cache.layers,
            self._cache.attention_metadata(self._batch, plan),
        )

    def _widths(self, slots_S: Int64Array) -> Int64Array:
        """Return the number of mask tokens of each slot's block. The drafts depend on it."""
        lengths_S = self._num_tokens[slots_S].astype(np.int64)
        most = min(self._num_drafts, self._layout.block_size - 1)
        most_S = np.minimum(most, self._batch.max_model_len - 1 - lengths_S).astype(np.int32)
        # The block contains an entry for the last draft.
        widths_S = self._target_cache.limit_proposals(most_S, lengths_S, num_unwritten=0)
        return widths_S.astype(np.int64)

    def _draft_block(self, slots_S: Int64Array, limits_S: Int64Array, widths_S: Int64Array) -> None:
        """Run the head for a block of each slot, and write the first `limits_S` of the drafts."""
        lengths_S = self._num_tokens[slots_S].astype(np.int64)
        plan = plan_chunks(slots_S, lengths_S - 1, 1 + widths_S)
        if not self._layout.is_causal:
            ranges_S2 = np.stack((lengths_S - 1, lengths_S + widths_S), 1).astype(np.int32)
            plan.visible_T2 = ranges_S2.repeat(1 + widths_S, 0)
        starts_S = plan.query_start_loc[:-1].astype(np.int64)
        tokens = self._batch.host_token_ids_NL
        ids_T = np.full(len(plan.slots_T), self._layout.mask_token_id, tokens.dtype)
        ids_T[starts_S] = tokens[slots_S, lengths_S - 1]
        inputs_TD = self._fusion.embed(to_device(ids_T, self._device))
        self._model.forward(
            inputs_TD.to(self._dtype) if self._in_torch else inputs_TD,
            to_device(plan.positions_T, self._device),
            self._cache.layers,
            self._cache.attention_metadata(self._batch, plan),
        )
        kept_TE = self._model.kept_hidden_TE
        assert kept_TE is not None
        numbers = np.arange(limits_S.sum()) - np.repeat(np.cumsum(limits_S) - limits_S, limits_S)
        rows = np.repeat(starts_S + 1, limits_S) + numbers
        slots = np.repeat(slots_S, limits_S).astype(np.int32)
        columns = (np.repeat(lengths_S, limits_S) + numbers).astype(np.int32)
        chosen = self._choose(kept_TE[to_device(rows, self._device)], slots, columns)
        tokens[slots, columns] = on_host(chosen)

    @torch.inference_mode()
    def warm_up(self, num_tokens: int) -> None:
        """Run the head on the null block, for `num_tokens` tokens and for one, to compile kernels."""
        width = self._target.kept_width
        for count in (num_tokens, 1):
            plan = even_requests(count, -(-count // (self._batch.max_model_len - 1)))
            hidden_TE = torch.zeros((count, width), device=self._device)
            counts_S = np.diff(plan.query_start_loc)
            starts_S = plan.query_start_loc[:-1]
            self._store(
                ComputedRows(plan.slots_S, plan.num_computed_S, counts_S, starts_S, hidden_TE)
            )
            metadata = self._cache.attention_metadata(self._batch, plan)
            inputs_TD = self._fusion.no_states(count)
            self._model.forward(
                inputs_TD.to(self._dtype) if self._in_torch else inputs_TD,
                to_device(plan.positions_T, self._device),
                self._cache.layers,
                metadata,
            )
