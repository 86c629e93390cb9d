"""Present a step by request ids: which requests compute how many tokens, which are new, which finished.

The message itself contains slots and differences. Tests and the scheduler's half of KV connectors
need requests. The names are those of vLLM's `SchedulerOutput`.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from ...protocol.arrays import int32_view
from ...protocol.worker_messages import NewRequestData, SchedulerOutput
from ..kv_cache.block_pool import NULL_BLOCK
from ..state.request import RequestKey
from .scheduler import Scheduler
from .step_rows import StepRows

BlockIds: TypeAlias = tuple[list[int], ...]
"""One list per KV-cache group."""

UNKNOWN_DRAFT = -1
"""Stands for a draft that only the workers have so far."""


class CachedRequestData(NamedTuple):
    """Requests that the workers already have state for, in the order of the batch.

    `num_computed_tokens` counts the tokens before the step. `new_block_ids` has all blocks of the
    requests in `resumed_req_ids`, which had been preempted, and the additional blocks of the
    others.
    """

    req_ids: list[str]
    resumed_req_ids: set[str]
    num_computed_tokens: list[int]
    new_block_ids: list[BlockIds]


class StepView(NamedTuple):
    """A step by request ids. `num_scheduled_tokens` is in the order of the batch.

    Requests that left their slot before the step are in `finished_req_ids` or `preempted_req_ids`.
    Requests in `scheduled_new_reqs` have never had a slot before.
    """

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    finished_req_ids: set[str]
    preempted_req_ids: set[str]
    scheduled_spec_decode_tokens: dict[str, list[int]]
    scheduled_encoder_inputs: dict[str, list[int]]
    free_encoder_mm_hashes: list[bytes]
    structured_output_request_ids: list[str]
    num_common_prefix_blocks: int

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Number of tokens that the step computes."""
        return sum(self.num_scheduled_tokens.values())


def req_id(key: RequestKey) -> str:
    """Return the id of a request in a view: its client index and its request index."""
    return f"{key[0]}-{key[1]}"


class StepViews:
    """Reads the steps of a scheduler, starting with the first one."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._rows = StepRows()
        self._keys: dict[int, RequestKey] = {}

    def read(self, step: SchedulerOutput) -> StepView:
        """Return the view of the last scheduled step. Called before the scheduler changes again."""
        finished, preempted = self._remove(step)
        self._keys.update((data.slot, data.request_id) for data in step.new_requests)
        counts = self._rows.read(step)
        slots = self._rows.slots.tolist()
        names = [self._name(slot) for slot in slots]
        new = [data for data in step.new_requests if not self._is_resumed(data)]
        new_names = {req_id(data.request_id) for data in new}
        resumed = {req_id(data.request_id) for data in step.new_requests} - new_names
        is_cached = [name not in new_names for name in names]
        num_computed = self._scheduler.slots.num_computed_tokens[self._rows.slots] - counts
        blocks = self._blocks(step)
        num_groups = len(self._scheduler.kv_cache_manager.groups)
        none: BlockIds = tuple([] for _ in range(num_groups))
        cached = [name for name, wanted in zip(names, is_cached, strict=True) if wanted]
        return StepView(
            num_scheduled_tokens=dict(zip(names, counts.tolist(), strict=True)),
            scheduled_new_reqs=new,
            scheduled_cached_reqs=CachedRequestData(
                cached,
                resumed,
                num_computed[is_cached].tolist(),
                [blocks.get(name, none) for name in cached],
            ),
            finished_req_ids=finished,
            preempted_req_ids=preempted,
            scheduled_spec_decode_tokens=_drafts(step, names),
            scheduled_encoder_inputs=self._encoder_inputs(step),
            free_encoder_mm_hashes=step.encoders.freed_hashes if step.encoders else [],
            structured_output_request_ids=list(
                map(self._name, int32_view(step.grammar_slots).tolist())
            ),
            num_common_prefix_blocks=step.num_common_blocks,
        )

    def _name(self, slot: int) -> str:
        return req_id(self._keys[slot])

    def _remove(self, step: SchedulerOutput) -> tuple[set[str], set[str]]:
        keys = [self._keys.pop(slot) for slot in int32_view(step.removed_slots).tolist()]
        preempted = {req_id(key) for key in keys if key in self._scheduler.requests}
        finished = {req_id(key) for key in keys} - preempted
        return finished, preempted

    def _is_resumed(self, data: NewRequestData) -> bool:
        return self._scheduler.requests[data.request_id].num_admissions > 1

    def _blocks(self, step: SchedulerOutput) -> dict[str, BlockIds]:
        """Return the blocks that each request gets in this step."""
        num_groups = len(self._scheduler.kv_cache_manager.groups)
        blocks: dict[str, BlockIds] = {
            req_id(data.request_id): tuple(int32_view(ids).tolist() for ids in data.block_ids)
            for data in step.new_requests
        }
        for group, slot, _, block in int32_view(step.block_updates).reshape(-1, 4).tolist():
            if block != NULL_BLOCK:
                name = self._name(slot)
                blocks.setdefault(name, tuple([] for _ in range(num_groups)))[group].append(block)
        return blocks

    def _encoder_inputs(self, step: SchedulerOutput) -> dict[str, list[int]]:
        """Return the indices of the inputs of each request that the encoder computes."""
        inputs: dict[str, list[int]] = {}
        if step.encoders is not None:
            for slot, index in int32_view(step.encoders.computed).reshape(-1, 2).tolist():
                inputs.setdefault(self._name(slot), []).append(index)
        return inputs


def _drafts(step: SchedulerOutput, names: list[str]) -> dict[str, list[int]]:
    counts = int32_view(step.drafts).reshape(-1, 2).tolist()
    known = iter(int32_view(step.draft_token_ids).tolist())
    return {
        names[position]: [next(known, UNKNOWN_DRAFT) for _ in range(count)]
        for position, count in counts
    }
