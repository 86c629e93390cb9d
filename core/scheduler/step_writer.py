"""Encode a decided step as the message to the workers and the record of what its output must contain."""

from __future__ import annotations

import msgspec
import numpy as np

from ...protocol.arrays import BoolArray, Int32Array, Int64Array, are_all, int32_pairs, pack_int32
from ...protocol.messages import SchedulerStats
from ...protocol.worker_messages import SchedulerOutput
from ..kv_cache.manager import KVCacheManager
from ..state.batch import Batch, ScheduledRow, StepInFlight
from ..state.running_requests import RunningRequests
from ..state.slots import SlotArray, as_array
from .admission import Admissions
from .features.speculative import Drafts
from .running import RunningPlan


class StepWriter:
    """Encodes each step as its difference from the previous step, whose rows it keeps."""

    def __init__(
        self, running: RunningRequests, manager: KVCacheManager, drafts: Drafts | None
    ) -> None:
        self._running = running
        self._slots = running.slots
        self._manager = manager
        self._drafts = drafts
        self._last_batch = Batch(running.order, running.slots)
        self._num_common_blocks = 0

    @property
    def last_slots(self) -> SlotArray:
        """The slots of the last step, in the order of its rows."""
        return self._last_batch.slots

    def count_step(self, stats: SchedulerStats, plan: RunningPlan, admitted: Admissions) -> None:
        """Count a step and its tokens, without those of warm-up requests."""
        num_counted = plan.num_tokens
        for data, granted in zip(admitted.requests, admitted.granted, strict=True):
            request = self._slots.requests[data.slot]
            if request is None or not request.is_warm_up:
                num_counted += granted
        stats.num_scheduled_tokens += num_counted
        if num_counted or not admitted.requests:
            stats.num_steps += 1

    def write(
        self,
        step: int,
        plan: RunningPlan,
        samples: BoolArray,
        admitted: Admissions,
        now: float,
    ) -> tuple[SchedulerOutput, StepInFlight]:
        """Return message number `step` to the workers, and the record that is kept until its output arrives."""
        slots, granted = plan.slots, plan.granted
        num_drafts = plan.num_drafts(samples) if self._drafts is not None else None
        if not are_all(granted):
            positions = granted.nonzero()[0]
            slots, granted, samples = slots[positions], granted[positions], samples[positions]
            if num_drafts is not None:
                num_drafts = num_drafts[positions]
        if admitted.requests:
            new_slots = as_array([request.slot for request in admitted.requests])
            slots = np.concatenate((slots, new_slots))
            granted = np.concatenate((granted, as_array(admitted.granted)))
            samples = np.concatenate((samples, np.array(admitted.samples, np.bool_)))
            if num_drafts is not None:
                num_drafts = np.concatenate((num_drafts, np.zeros(len(new_slots), np.int64)))
        last = self._last_batch
        is_same = slots.tobytes() == last.slots.tobytes()
        if not is_same or last.num_vacated != self._slots.num_vacated:
            self._last_batch = Batch(slots.copy(), self._slots)
            self._num_common_blocks = self._manager.tables.count_common_blocks(slots)
        batch = self._last_batch
        sampling = batch if are_all(samples) else batch.select(samples)
        drafts = draft_token_ids = draft_limits = b""
        if num_drafts is not None and self._drafts is not None:
            drafted = num_drafts.nonzero()[0]
            drafts = int32_pairs(drafted, num_drafts[drafted])
            taken = self._drafts.take_drafts(slots, num_drafts)
            draft_token_ids = taken.tobytes()
            draft_limits = self._drafts.limits.take_changes(slots)
            constrained = self._constrained_rows_with_drafts(sampling, num_drafts[samples], taken)
        else:
            constrained = self._constrained_rows(sampling)
        if num_drafts is not None:
            num_drafts = num_drafts[samples] if drafts else None
        else:
            num_drafts = self._running.passes.count_extra(sampling.slots)
        prefilled = self._running.take_completed_prefills()
        has_prefill = bool(prefilled or self._running.prefilling)
        in_flight = StepInFlight(
            step,
            batch,
            sampling,
            prefilled,
            constrained,
            now,
            has_prefill,
            plan.num_prompt_tokens + sum(admitted.granted),
            admitted.loading,
            num_drafts,
            self._find_progress(),
        )
        chunked = (granted != 1).nonzero()[0]
        removed = self._running.take_removed()
        host = self._manager.cpu_offload
        copies_out, copies_in = host.take_copies() if host is not None else (b"", b"")
        output = SchedulerOutput(
            step=step,
            removed_slots=pack_int32(removed),
            new_requests=admitted.requests,
            block_updates=self._manager.tables.take_updates(),
            slots=None if is_same else batch.slot_bytes,
            chunks=int32_pairs(chunked, granted[chunked]) if len(chunked) else b"",
            grammar_slots=pack_int32([row.request.slot for row in constrained]),
            drafts=drafts,
            draft_token_ids=draft_token_ids,
            host_copies_out=copies_out,
            host_copies_in=copies_in,
            num_common_blocks=self._num_common_blocks,
            draft_limits=draft_limits,
        )
        return output, in_flight

    def _find_progress(self) -> list[tuple[ScheduledRow, int]]:
        """Return the prefilling requests that report their progress, with the number of their computed tokens."""
        if not self._running.num_reporting:
            return []
        num_computed = self._slots.num_computed_tokens
        requests = map(self._running.__getitem__, self._running.prefilling)
        return [
            (ScheduledRow(request, request.num_admissions), int(num_computed[request.slot]))
            for request in requests
            if request.params.reports_progress
        ]

    def _constrained_rows_with_drafts(
        self, sampling: Batch, num_drafts: Int64Array, draft_token_ids: Int32Array
    ) -> list[ScheduledRow]:
        """Return the constrained rows, each with its drafts. Only rows that sample have drafts."""
        if not self._running.num_constrained:
            return []
        starts = np.cumsum(num_drafts) - num_drafts
        rows = {row.request.slot: row for row in self._constrained_rows(sampling)}
        for slot, start, count in zip(
            sampling.slots.tolist(), starts.tolist(), num_drafts.tolist(), strict=True
        ):
            if slot in rows and count:
                known = draft_token_ids[start : start + count].tolist()
                rows[slot] = msgspec.structs.replace(
                    rows[slot], num_drafts=count, draft_token_ids=known or None
                )
        return list(rows.values())

    def _constrained_rows(self, sampling: Batch) -> list[ScheduledRow]:
        if not self._running.num_constrained:
            return []
        requests = map(self._running.__getitem__, sampling.slots.tolist())
        return [
            ScheduledRow(request, request.num_admissions)
            for request in requests
            if request.params.structured_output is not None
        ]
