"""A head that proposes a block of drafts in one pass: DFlash (arXiv 2602.06036) or DSpark.

Each layer has keys and values of the known tokens, computed from the model's hidden states when the model computes the
tokens. To propose, the layers run once for a block: the last token, which the model has not computed yet, and mask
tokens. The tokens of the block attend to all known tokens and to each other. In DFlash, a mask token predicts the token
in its place. In DSpark, each token predicts the next one, and a Markov head makes it depend on the draft before it. In
XPress, a DFlash head, a refiner makes it depend on all drafts before it.

Shapes: S slots of a step, T tokens, R drafts, D hidden size, E elements of a token's hidden states, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ....protocol.arrays import Int32Array, Int64Array, offsets_in_runs
from ....protocol.config import EngineConfig
from ...attention import PagedAttention
from ...batch import StepPlan, even_requests, plan_chunks
from ...cpu.decoder import NativeDecoder
from ...cpu.drafts import Drafts
from ...device.dtypes import as_tensor, on_host
from ...device.transfers import to_device
from ...layers.parallel.shard import ModelShard
from ...layers.spec import ModelSpec
from ...models.decoder import Decoder
from .computed import ComputedRows
from .draft_head import DraftHead
from .in_order.markov import MarkovHead
from .in_order.refiner import BlockStart, Refiner
from .in_order.selector import CandidateSelector
from .tensors import HeadTensors


class BlockHead(DraftHead):
    """A head that proposes a block of drafts in one pass. With tensor parallelism, each rank has the whole head."""

    def _load(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        shard: ModelShard,
        attention: PagedAttention,
        tensors: HeadTensors,
        on_progress: Callable[[int, int], None],
    ) -> NativeDecoder | Decoder:
        self._markov: MarkovHead | Refiner | None = None
        if self._layout.has_markov:
            self._markov = (Refiner if self._layout.has_refiner else MarkovHead)(tensors)
        self._selector: CandidateSelector | None = None
        if self._layout.num_candidates:
            self._selector = CandidateSelector(tensors, self._layout)
        return super()._load(config, spec, shard, attention, tensors, on_progress)

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
        offsets_T = offsets_in_runs(counts_S)
        rows_T = to_device(
            offsets_T + np.repeat(computed.rows_S[has_rows_S], counts_S), self._device
        )
        plan = plan_chunks(slots_S, begins_S.astype(np.int64), counts_S)
        store = self._model.store_keys
        if self._layout.norms_context:
            assert isinstance(self._model, Decoder)
            store = partial(self._model.store_keys, has_norms=True)
        store(
            self.fusion.read_context(computed.hidden_TE[rows_T]),
            to_device(plan.positions_T, self._device),
            self._cache.layers,
            self._cache.attention_metadata(self._batch, plan),
        )

    def _widths(self, slots_S: Int64Array) -> Int64Array:
        """Return the number of drafts of each slot's block. They depend on it."""
        lengths_S = self._num_tokens[slots_S].astype(np.int64)
        most = min(self._num_drafts, self._layout.max_drafts)
        most_S = np.minimum(most, self._batch.max_model_len - 1 - lengths_S).astype(np.int32)
        # The block contains an entry for the last draft, unless the token before it predicts it.
        widths_S = self._target_cache.limit_proposals(
            most_S, lengths_S, num_unwritten=int(self._layout.predicts_from_last)
        )
        return widths_S.astype(np.int64)

    def _draft_block(self, slots_S: Int64Array, limits_S: Int64Array, widths_S: Int64Array) -> None:
        """Run the head for a block of each slot, and write the first `limits_S` of the drafts."""
        lengths_S = self._num_tokens[slots_S].astype(np.int64)
        first = 0 if self._layout.predicts_from_last else 1
        counts_S = first + widths_S
        plan = plan_chunks(slots_S, lengths_S - 1, counts_S)
        if self._layout.mutual_layers is not None:
            plan.span_layers = self._layout.mutual_layers
            first_S = np.maximum(lengths_S - 1 - self._layout.num_seen_before, 0)
            ranges_S2 = np.stack((first_S, lengths_S - 1 + counts_S), 1).astype(np.int32)
            plan.visible_T2 = ranges_S2.repeat(counts_S, 0)
        starts_S = plan.query_start_loc[:-1].astype(np.int64)
        tokens = self._batch.host_token_ids_NL
        ids_T = np.full(len(plan.slots_T), self._layout.mask_token_id, tokens.dtype)
        ids_T[starts_S] = tokens[slots_S, lengths_S - 1]
        self._run_blocks(self.fusion.embed(to_device(ids_T, self._device)), plan)
        kept_TE = self._model.kept_hidden_TE
        assert kept_TE is not None
        numbers = offsets_in_runs(limits_S)
        rows = np.repeat(starts_S + first, limits_S) + numbers
        slots = np.repeat(slots_S, limits_S).astype(np.int32)
        columns = (np.repeat(lengths_S, limits_S) + numbers).astype(np.int32)
        outputs_RE = kept_TE[to_device(rows, self._device)]
        if self._markov is not None or self._selector is not None:
            # Logits take much memory. There are at most as many rows of them as in a step without drafts.
            count = max(1, self._batch.num_slots // int(limits_S.max()))
            ends = np.cumsum(limits_S)
            start = self._begin_blocks(kept_TE, slots_S, counts_S, starts_S)
            for first_slot in range(0, len(limits_S), count):
                own_S = limits_S[first_slot : first_slot + count]
                end = int(ends[first_slot + len(own_S) - 1])
                part = slice(end - int(own_S.sum()), end)
                own = slice(first_slot, first_slot + len(own_S))
                of_slots = BlockStart(*(each[own] for each in start))
                self._choose_in_order(outputs_RE[part], slots[part], columns[part], own_S, of_slots)
            return
        tokens[slots, columns] = on_host(self.choose(outputs_RE, slots, columns))

    def _begin_blocks(
        self, kept_TE: Tensor, slots_S: Int64Array, counts_S: Int64Array, starts_S: Int64Array
    ) -> BlockStart:
        """Return what is known of blocks before their drafts, given the hidden states of all their tokens."""
        hidden_TD = kept_TE[:, : self._layout.spec.hidden_size]
        blocks_T = to_device(np.repeat(np.arange(len(counts_S)), counts_S), self._device)
        sums_SD = hidden_TD.new_zeros((len(counts_S), hidden_TD.shape[1]))
        sums_SD.index_add_(0, blocks_T, hidden_TD)
        before_S = np.maximum(self._num_tokens[slots_S].astype(np.int64) - 2, 0)
        return BlockStart(
            hidden_TD[to_device(starts_S, self._device)],
            sums_SD / to_device(counts_S, self._device).unsqueeze(1),
            to_device(self._batch.host_token_ids_NL[slots_S, before_S], self._device),
        )

    def _run_blocks(self, inputs_TD: Tensor, plan: StepPlan) -> None:
        """Run the head for the chunks of a plan, each of which is a block."""
        if isinstance(self._model, Decoder):
            starts_T = np.repeat(plan.query_start_loc[:-1], np.diff(plan.query_start_loc))
            places_T = np.arange(len(starts_T)) - starts_T
            self._model.places_T1 = to_device(places_T[:, None], self._device)
        if self._in_torch:
            # All streams begin as the embedding.
            inputs_TD = inputs_TD.to(self._dtype).repeat(1, self._layout.spec.num_streams or 1)
        self._model.forward(
            inputs_TD if self._layout.input_scale == 1 else inputs_TD * self._layout.input_scale,
            to_device(plan.positions_T, self._device),
            self._cache.layers,
            self._cache.attention_metadata(self._batch, plan),
        )

    def _choose_in_order(
        self,
        outputs_RE: Tensor,
        slots_R: Int32Array,
        columns_R: Int32Array,
        limits_S: Int64Array,
        start: BlockStart,
    ) -> None:
        """Choose `limits_S` drafts of each slot one after the other, and write them to these columns."""
        tokens = self._batch.host_token_ids_NL
        hidden_RD = outputs_RE[:, : self._layout.spec.hidden_size]
        ids, logits_RC = self._logits(hidden_RD, slots_R)
        if self._selector is not None:
            ids, logits_RC = self._selector.candidates(ids, logits_RC)
        rows_S = np.cumsum(limits_S) - limits_S
        state_SR = None if self._markov is None else self._markov.begin(start)
        for index in range(int(limits_S.max())):
            goes_on_S = limits_S > index
            rows_S, limits_S = rows_S[goes_on_S], limits_S[goes_on_S]
            now_S = rows_S + index
            at_S = to_device(now_S, self._device)
            slots_S, columns_S = slots_R[now_S], columns_R[now_S]
            previous_S = to_device(tokens[slots_S, columns_S - 1], self._device)
            logits_SC, ids_SC = logits_RC[at_S], ids
            if self._selector is not None:
                ids_SC = ids[at_S]
                logits_SC += self._selector.bias(previous_S, hidden_RD[at_S], ids_SC)
            elif self._markov is not None and state_SR is not None:
                state_SR = state_SR[to_device(goes_on_S, self._device)]
                bias_SV, state_SR = self._markov.bias(previous_S, hidden_RD[at_S], state_SR)
                count = min(logits_RC.shape[1], self._markov.num_tokens)
                logits_SC[:, :count] += bias_SV[:, :count]
            chosen_S = self._target.choose_among(ids_SC, logits_SC, slots_S, columns_S)
            tokens[slots_S, columns_S] = on_host(chosen_S)

    def _logits(self, hidden_RD: Tensor, slots_R: Int32Array) -> tuple[Tensor, Tensor]:
        """Return tokens [C], and their logits [R, C] for hidden states after the head's final norm."""
        if self._token_ids is not None:
            return self._token_ids, as_tensor(self._model.compute_logits(hidden_RD))
        if isinstance(self._target, Decoder):
            hidden_RD = hidden_RD.to(self._target.hidden_dtype)
        logits_RC = as_tensor(self._target.compute_logits(hidden_RD, slots_R))
        return torch.arange(logits_RC.shape[1], device=logits_RC.device), logits_RC

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
            self._run_blocks(self.fusion.no_states(count), plan)
