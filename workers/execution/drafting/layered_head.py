"""A head with a layer of its own for each of the first drafts: models with several layers for multi-token prediction.

At a position, layer k reads the token k + 1 positions later and the hidden state of the layer before it, so it predicts
the token k + 2 positions later. Drafts for which there is no layer come from the last layer, which then reads its own
hidden states.

At the last positions of a request, all layers but the first read drafts. Once the tokens in their place are known,
these positions are computed again. For this purpose, the head keeps the model's hidden states of the last positions.

Shapes: S slots of a step, T tokens, N slots, H kept positions, D hidden size, E elements of a token's hidden states.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....protocol.arrays import Int32Array, Int64Array, offsets_in_runs
from ....protocol.worker_messages import SchedulerOutput
from ...batch import PersistentBatch
from ...cpu.drafts import Drafts
from ...device.dtypes import on_host
from ...device.transfers import to_device
from .computed import ComputedRows
from .draft_head import DraftHead, HeadSource


class LayeredHead(DraftHead):
    """A head with several layers, of which this object is the first. With tensor parallelism, each rank has all."""

    def __init__(self, source: HeadSource) -> None:
        super().__init__(source)
        others = (DraftHead(source._replace(layout=own)) for own in source.layout.later)
        self._layers: list[DraftHead] = [self, *others]

    def use_batch(self, batch: PersistentBatch, num_blocks: int) -> None:
        """Prepare to draft for the requests of `batch`."""
        super().use_batch(batch, num_blocks)
        for layer in self._layers[1:]:
            layer.use_batch(batch, num_blocks)
        num_kept = len(self._layers) - 1
        states_TD = self.fusion.no_states(batch.num_slots * num_kept)
        self._kept_NHD = states_TD.unflatten(0, (batch.num_slots, num_kept))
        self._kept_ends_N = np.zeros(batch.num_slots, np.int64)
        self._num_kept_N = np.zeros(batch.num_slots, np.int64)

    def apply_output(self, output: SchedulerOutput) -> None:
        """Discard the hidden states of slots that have a new request."""
        for new in output.new_requests:
            self._num_kept_N[new.slot] = 0

    @torch.inference_mode()
    def propose(self, computed: ComputedRows, drafts: Drafts, *, samples: bool) -> int:
        """Run all layers for the tokens of a step, and write drafts for the slots that may have drafts.

        Return the number of passes through a layer. If `samples` is false, nothing was sampled and no drafts are
        written.
        """
        known = self._known_rows(computed)
        if not len(known.slots_S):
            return 0
        assert computed.hidden_TE is not None
        slots_S = known.slots_S
        limits_S = self._limits(drafts, slots_S) if samples else np.zeros(len(slots_S), np.int32)
        rows = self._with_kept(known.slots_S, known.begins_S, known.counts_S)
        hidden_TD = self._read_states(rows, computed.hidden_TE, known.rows_S)
        self._keep(rows, hidden_TD)
        last_S = np.cumsum(rows.counts_S) - 1
        for index, layer in enumerate(self._layers):
            outputs_TE = layer.run(slots_S, rows.begins_S, rows.counts_S, hidden_TD, index + 1)
            wants_S = limits_S > index
            outputs_SE = outputs_TE[to_device(last_S[wants_S], self._device)]
            self._write(layer, slots_S[wants_S], index, outputs_SE)
            hidden_TD = layer.fusion.read_own(outputs_TE)
        self._continue_last(slots_S[wants_S], limits_S[wants_S], outputs_SE)
        has_drafts_S = limits_S > 0
        if has_drafts_S.any():
            drafts.add_found(slots_S[has_drafts_S], limits_S[has_drafts_S].astype(np.int32))
        return max(len(self._layers), int(limits_S.max()))

    def _with_kept(self, slots_S: Int64Array, begins_S: Int64Array, counts_S: Int64Array) -> _Rows:
        """Return these positions, preceded by those whose hidden states are kept."""
        follows_S = self._kept_ends_N[slots_S] == begins_S
        num_kept_S = np.where(follows_S, self._num_kept_N[slots_S], 0)
        return _Rows(slots_S, begins_S - num_kept_S, counts_S + num_kept_S, num_kept_S)

    def _read_states(self, rows: _Rows, hidden_TE: Tensor, rows_S: Int64Array) -> Tensor:
        """Return the model's hidden states of `rows`, [T, D]: kept ones, and from `rows_S` on in `hidden_TE`."""
        num_kept = self._kept_NHD.shape[1]
        numbers_T, num_kept_T = (
            offsets_in_runs(rows.counts_S),
            np.repeat(rows.num_kept_S, rows.counts_S),
        )
        computed_T = np.repeat(rows_S, rows.counts_S) + numbers_T - num_kept_T
        kept_T = np.repeat(rows.slots_S, rows.counts_S) * num_kept + num_kept - num_kept_T
        is_kept_T = numbers_T < num_kept_T
        sources_T = to_device(np.where(is_kept_T, 0, computed_T), self._device)
        hidden_TD = self.fusion.read_target(hidden_TE[sources_T]).clone()
        kept = to_device((kept_T + numbers_T)[is_kept_T], self._device)
        flags_T = to_device(is_kept_T, self._device)
        hidden_TD[flags_T] = self._kept_NHD.flatten(0, 1)[kept].to(hidden_TD.dtype)
        return hidden_TD

    def _keep(self, rows: _Rows, hidden_TD: Tensor) -> None:
        """Keep the hidden states of the last positions of each slot."""
        num_kept = self._kept_NHD.shape[1]
        ends_T = np.repeat(rows.counts_S, rows.counts_S) - offsets_in_runs(rows.counts_S)
        is_last_T = ends_T <= num_kept
        places_T = np.repeat(rows.slots_S, rows.counts_S) * num_kept + num_kept - ends_T
        places = to_device(places_T[is_last_T], self._device)
        chosen_TD = hidden_TD[to_device(is_last_T, self._device)]
        self._kept_NHD.flatten(0, 1)[places] = chosen_TD.to(self._kept_NHD.dtype)
        self._kept_ends_N[rows.slots_S] = rows.begins_S + rows.counts_S
        self._num_kept_N[rows.slots_S] = np.minimum(rows.counts_S, num_kept)

    def _continue_last(self, slots_S: Int64Array, limits_S: Int32Array, outputs_SE: Tensor) -> None:
        """Write the drafts for which there is no layer, beginning with the hidden states of the last layer."""
        last, count = self._layers[-1], len(self._layers)
        for index in range(count, int(limits_S.max(initial=0))):
            goes_on_S = limits_S > index
            slots_S, limits_S = slots_S[goes_on_S], limits_S[goes_on_S]
            hidden_SD = last.fusion.read_own(outputs_SE[to_device(goes_on_S, self._device)])
            begins_S = self._num_tokens[slots_S].astype(np.int64) + index - count - 1
            ones_S = np.ones_like(slots_S)
            outputs_SE = last.run(slots_S, begins_S, ones_S, hidden_SD, count)
            self._write(last, slots_S, index, outputs_SE)

    def _write(self, layer: DraftHead, slots_S: Int64Array, index: int, outputs_SE: Tensor) -> None:
        """Write the draft `index` of each slot, chosen from the hidden states of a layer."""
        if not len(slots_S):
            return
        positions_S = (self._num_tokens[slots_S] + index).astype(np.int32)
        chosen_S = layer.choose(outputs_SE, slots_S.astype(np.int32), positions_S)
        self._batch.host_token_ids_NL[slots_S, positions_S] = on_host(chosen_S)

    @torch.inference_mode()
    def warm_up(self, num_tokens: int) -> None:
        """Run all layers on the null block, for `num_tokens` tokens and for one, to compile kernels."""
        super().warm_up(num_tokens)
        for layer in self._layers[1:]:
            layer.warm_up(num_tokens)


class _Rows(NamedTuple):
    """Positions to compute: `counts_S` of each slot, from `begins_S` on. The first `num_kept_S` are computed again."""

    slots_S: Int64Array
    begins_S: Int64Array
    counts_S: Int64Array
    num_kept_S: Int64Array
