"""Blocks under way: asynchronous loads, blocks kept for others to fetch, and what comes of them."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from ..protocol.arrays import int32_view
from ..protocol.config import KVTransferConfig, LoadFailurePolicy
from ..protocol.errors import EngineError
from ..protocol.messages import (
    FinishReason,
    KVConnectorOutput,
    KVConnectorStats,
    SchedulerOutput,
)
from .batch import StepInFlight
from .kv_cache_manager import Prefix
from .kv_connector import EndOfRequest, ExternalMatch, KVConnector
from .request import Request, RequestStatus
from .request_lifecycle import RequestLifecycle

NOTHING_TO_LOAD: Final = ExternalMatch(0)


class ConnectorError(EngineError):
    """The KV connector's answer about one request makes no sense."""


class _Load(NamedTuple):
    """An asynchronous load. `num_tokens` are the local ones and the loaded ones."""

    request: Request
    num_tokens: int
    invalid_blocks: set[int]


class KVTransfers:
    """Between the scheduler and its `KVConnector`. An error of the connector ends only the request it is about."""

    def __init__(
        self, connector: KVConnector, config: KVTransferConfig, lifecycle: RequestLifecycle
    ) -> None:
        self.connector = connector
        self._policy = config.kv_load_failure_policy
        self._timeout_s = config.transfer_timeout_s
        self._lifecycle = lifecycle
        self._manager = lifecycle.manager
        self.stats = KVConnectorStats()
        self._loads: dict[int, _Load] = {}
        self._reservations = lifecycle.reservations
        self._sends: set[int] = set()
        self._new_sends: list[int] = []
        self._deadlines: deque[tuple[float, int]] = deque()
        self._has_news = False
        self._has_unanswered = False

    @property
    def are_outstanding(self) -> bool:
        """Whether something waits for the workers, or for an answer of the connector."""
        return bool(self._loads or self._sends or self._has_unanswered)

    def begin_step(self, now: float) -> None:
        """Give up what was to be fetched and was not."""
        self._has_unanswered = False
        for transfer_id in self._new_sends:
            self._deadlines.append((now + self._timeout_s, transfer_id))
        self._new_sends.clear()
        while self._deadlines and self._deadlines[0][0] <= now:
            transfer_id = self._deadlines.popleft()[1]
            if transfer_id in self._sends:
                self._sends.remove(transfer_id)
                self._manager.release_reserved(transfer_id)
                self._has_news = True
                self.stats.num_expired_transfers += 1
                self.connector.transfer_expired(transfer_id)

    def needs_step(self, is_anything_in_flight: bool) -> bool:
        """Whether the workers must be told or asked something, even with nothing to compute."""
        return self._has_news or (self.are_outstanding and not is_anything_in_flight)

    def describe(self, step: SchedulerOutput) -> None:
        """Put the connector's message to the workers into a step."""
        self._has_news = False
        step.kv_connector_metadata = self.connector.build_connector_meta(step)

    def take_stats(self) -> KVConnectorStats:
        """Counts since the last call."""
        stats, self.stats = self.stats, KVConnectorStats()
        stats.counts = self.connector.take_stats()
        return stats

    # before admission

    def match(self, request: Request, prefix: Prefix) -> ExternalMatch | None:
        """What to load beyond a prefix. None if that is not known yet, or if the request has failed over it."""
        if prefix.is_reserved:
            return NOTHING_TO_LOAD
        self._reservations.end(request)
        if request.computes_locally or request.scores_prompt:
            return NOTHING_TO_LOAD
        try:
            match = self.connector.get_num_new_matched_tokens(request, prefix.num_tokens)
            if match is None:
                self._has_unanswered = True
                return None
            num_tokens, is_async = match
            most = request.num_tokens - prefix.num_tokens
            if not (isinstance(num_tokens, int) and 0 <= num_tokens <= most):
                raise ConnectorError(
                    f"{num_tokens} tokens were matched after {prefix.num_tokens} "
                    f"of {request.num_tokens}"
                )
        except Exception as error:
            self._fail(request, error)
            return None
        if not is_async:
            num_tokens = min(num_tokens, request.num_tokens - prefix.num_tokens - 1)
        return ExternalMatch(num_tokens, is_async and num_tokens > 0)

    def allocated(self, request: Request, blocks: list[int], num_tokens: int) -> bool:
        """Blocks were allocated for a load. False if that failed the request; the blocks are free again then."""
        try:
            self.connector.update_state_after_alloc(request, blocks, num_tokens)
        except Exception as error:
            self._manager.pool.release(blocks)
            self._fail(request, error)
            return False
        self._has_news = True
        return True

    def begin_load(self, request: Request, blocks: list[int], num_tokens: int) -> None:
        """An asynchronous load begins, after which `num_tokens` tokens are there."""
        self._manager.reserve(request, blocks)
        self._loads[request.transfer_id] = _Load(request, num_tokens, set())
        self._lifecycle.wait_for_load(request)

    # the end of a request

    def ending(self, request: Request, reason: FinishReason) -> EndOfRequest:
        """A request is about to end, and still has its blocks. Raises what the connector raises."""
        was = request.status
        blocks: list[int] = []
        if was is RequestStatus.RUNNING:
            blocks = self._manager.blocks[0][request.slot]
        elif was is RequestStatus.WAITING_FOR_REMOTE_KVS:
            (blocks,) = self._manager.reserved[request.transfer_id]
        self._has_news = True
        end = self.connector.request_finished(request, list(blocks), reason)
        if end.delays_free and was is RequestStatus.RUNNING and blocks:
            self._manager.keep(request, len(blocks))
            self._sends.add(request.transfer_id)
            self._new_sends.append(request.transfer_id)
        return end

    # what the workers report

    def take(self, step: StepInFlight, report: KVConnectorOutput | None, now: float) -> None:
        """Take in the transfers' results, before the tokens of the same step."""
        if report is not None:
            if report.invalid_block_ids:
                self._take_invalid(step, set(int32_view(report.invalid_block_ids).tolist()), now)
            for transfer_id in report.finished_sending:
                if transfer_id in self._sends:
                    self._sends.remove(transfer_id)
                    self._manager.release_reserved(transfer_id)
            for transfer_id in report.finished_recving:
                load = self._loads.pop(transfer_id, None)
                if load is not None:
                    self._end_load(load)
        for row in step.loading:
            if row.is_alive:
                row.request.has_untrusted_blocks = False
                slot = row.request.slot
                num_computed = int(self._lifecycle.running.slots.num_computed_tokens[slot])
                self._manager.cache_blocks(row.request, num_computed)

    def _end_load(self, load: _Load) -> None:
        request, num_tokens, invalid_blocks = load
        if request.is_finished:
            self._manager.release_reserved(request.transfer_id)
            return
        (blocks,) = self._manager.reserved[request.transfer_id]
        num_valid = _num_valid_blocks(blocks, invalid_blocks)
        if num_valid < len(blocks):
            self.stats.num_failed_loads += 1
            if self._policy is LoadFailurePolicy.FAIL:
                self._manager.release_reserved(request.transfer_id)
                self._fail_load(request, blocks[num_valid])
                return
            request.computes_locally = True
            num_tokens = min(num_tokens, num_valid * self._manager.block_size)
        self._lifecycle.load_ended(request)
        self._reservations.add(request, num_tokens)

    def _take_invalid(self, step: StepInFlight, invalid_blocks: set[int], now: float) -> None:
        """Cut every affected request back to what precedes its first bad block."""
        for load in self._loads.values():
            load.invalid_blocks.update(invalid_blocks)
        lifecycle, manager = self._lifecycle, self._manager
        for slot, request in step.batch.owners(lifecycle.running.slots).items():
            blocks = manager.blocks[0][slot]
            num_valid = _num_valid_blocks(blocks, invalid_blocks)
            if num_valid == len(blocks):
                continue
            self.stats.num_failed_loads += 1
            bad_block = blocks[num_valid]
            manager.distrust(request, num_valid)
            if self._policy is LoadFailurePolicy.FAIL:
                self._fail_load(request, bad_block)
                continue
            manager.keep(request, num_valid)
            lifecycle.preempt(slot, now)
            request.has_untrusted_blocks = False
            request.computes_locally = True
            self._reservations.add(request, num_valid * manager.block_size)

    def _fail_load(self, request: Request, block: int) -> None:
        message = f"the KV cache of the request could not be loaded into block {block}"
        self._lifecycle.finish(request, FinishReason.ERROR, message=message)

    def _fail(self, request: Request, error: Exception) -> None:
        self._lifecycle.finish(request, FinishReason.ERROR, message=f"KV connector: {error}")


def _num_valid_blocks(blocks: list[int], invalid_blocks: set[int]) -> int:
    """How many of a request's blocks precede its first invalid one."""
    if invalid_blocks.isdisjoint(blocks):
        return len(blocks)
    return next(index for index, block in enumerate(blocks) if block in invalid_blocks)
