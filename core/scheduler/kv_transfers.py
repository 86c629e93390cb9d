"""Track KV transfers: asynchronous loads, blocks kept until another process has fetched them, and failed loads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import Final

from ...protocol.arrays import int32_bytes, int32_view
from ...protocol.config import KVTransferConfig, LoadFailurePolicy
from ...protocol.errors import ConfigError, EngineError
from ...protocol.messages import FinishReason, KVConnectorStats
from ...protocol.worker_messages import KVConnectorOutput, SchedulerOutput
from ..kv_cache.block_tables import RequestBlocks
from ..kv_cache.cached_prefix import Deferred
from ..kv_cache.connector import BlockConnector, ExternalMatch, KVConnector, RequestEnd
from ..kv_cache.external_load import ExternalLoad, HeldLoad, LoadInProgress
from ..kv_cache.load_checks import LoadChecks
from ..kv_cache.manager import Prefix
from ..state.batch import StepInFlight
from ..state.request import Request, RequestKey, RequestStatus
from .lifecycle import RequestLifecycle

OVERDUE: Final = -(1 << 40)
"""The blocks of an overdue load are reserved under this number minus its transfer id. The KV handoff uses -1, -2, …"""

NOTHING_TO_LOAD: Final = ExternalMatch(0)


class ConnectorError(EngineError):
    """The KV connector returned an invalid result for a request."""


class KVTransfers:
    """Connects the scheduler to its `KVConnector`. An error of the connector fails only the request that it concerns.

    Raises:
        ConfigError: The connector does not support the model, or does not work together with CPU KV offload.
    """

    def __init__(
        self, connector: KVConnector, config: KVTransferConfig, lifecycle: RequestLifecycle
    ) -> None:
        self.connector = connector
        self.blocks = connector if isinstance(connector, BlockConnector) else None
        """The connector if it is a `BlockConnector`, which loads single blocks; else None."""
        self._policy = config.kv_load_failure_policy
        if config.kv_role == "kv_producer":
            # It computes prompts, so it can compute those that a decode server has evicted.
            self._policy = LoadFailurePolicy.RECOMPUTE
        self._timeout_s = config.transfer_timeout_s
        self._load_timeout_s = config.load_timeout_s
        self._lifecycle = lifecycle
        self._manager = manager = lifecycle.manager
        lifecycle.refusals.on_refusal = connector.request_refused
        if self.blocks is None and not (manager.tables.is_simple and manager.cpu_offload is None):
            raise ConfigError(
                f"kv_connector={config.kv_connector!r} supports only full attention without CPU "
                "KV offload; remove the connector or --kv-host-gib, or use another model"
            )
        if self.blocks is not None:
            pool = manager.pool
            self.blocks.observe_pool(pool.get_cached_block, manager.block_size)
            pool.listener = self.blocks
        self.stats = KVConnectorStats()
        self._checks = LoadChecks(config, manager.block_size)
        self._loads: dict[int, LoadInProgress] = {}
        self._new_loads: list[LoadInProgress] = []
        self._load_deadlines: deque[tuple[float, LoadInProgress]] = deque()
        self._overdue: set[int] = set()
        """Loads that have not ended in time. Nothing else is loaded until they end, because the connector may hang."""
        self._unclean: set[int] = set()
        """Blocks that a failed load may have filled with anything, which the next step clears."""
        self._held_loads: dict[int, HeldLoad] = {}
        self._in_use: dict[int, int] = {}
        """Freed blocks that steps in flight may still use, with the number of the last such step."""
        self._reservations = lifecycle.reservations
        self._sends: dict[int, RequestKey] = {}
        """The transfers whose blocks are held until another process has fetched them, with their requests."""
        self._new_sends: list[int] = []
        self._deadlines: deque[tuple[float, int]] = deque()
        self._has_updates = False
        self._has_unanswered = False
        self.has_counts = False
        """True if a report without a step output has arrived since the last statistics."""

    @property
    def are_outstanding(self) -> bool:
        """True if a transfer is in progress, or the connector has deferred an answer about a request."""
        return bool(self._loads or self._overdue or self._sends or self._has_unanswered)

    @property
    def have_work(self) -> bool:
        """True if a transfer is in progress, or the connector has metadata for the workers."""
        return self.are_outstanding or self._has_updates or self.connector.needs_step()

    def expire(self, now: float) -> None:
        """End the transfers that have not ended before their timeout."""
        self._has_unanswered = False
        self._expire_sends(now)
        self._expire_loads(now)

    def _expire_loads(self, now: float) -> None:
        """Compute the requests whose loads hang, or fail them. Loads that hang may still write to their blocks.

        These are held until the loads end, also those of requests that have finished.
        """
        for load in self._new_loads:
            self._load_deadlines.append((now + self._load_timeout_s, load))
        self._new_loads.clear()
        while self._load_deadlines and self._load_deadlines[0][0] <= now:
            load = self._load_deadlines.popleft()[1]
            request = load.load.request
            transfer_id = request.transfer_id
            if self._loads.get(transfer_id) is not load:
                continue
            self.stats.num_failed_loads += 1
            reserved = self._manager.reserved
            if self._may_fail(request) and not request.is_finished:
                self._fail_load(request, next(filter(None, chain(*reserved[transfer_id]))))
            del self._loads[transfer_id]
            self._overdue.add(transfer_id)
            reserved[OVERDUE - transfer_id] = reserved.pop(transfer_id)
            if not request.is_finished:
                request.computes_locally = True
                self._lifecycle.requeue_loaded(request)

    def _expire_sends(self, now: float) -> None:
        """Free the blocks that were kept for another process and were not fetched before the timeout."""
        for transfer_id in self._new_sends:
            self._deadlines.append((now + self._timeout_s, transfer_id))
        self._new_sends.clear()
        while self._deadlines and self._deadlines[0][0] <= now:
            transfer_id = self._deadlines.popleft()[1]
            if transfer_id in self._sends:
                self.stats.num_expired_transfers += 1
                self._end_send(transfer_id)

    def _end_send(self, transfer_id: int) -> None:
        """Free blocks that were held for another process, which may not have fetched them."""
        del self._sends[transfer_id]
        self._mark_in_use(self._manager.reserved[transfer_id])
        self._manager.release_reserved(transfer_id)
        self._has_updates = True
        self.connector.transfer_expired(transfer_id)

    def find_held(self, client_index: int) -> list[RequestKey]:
        """Return the finished requests of a client whose blocks are held."""
        return [key for key in self._sends.values() if key[0] == client_index]

    def release_held(self, keys: Iterable[RequestKey]) -> None:
        """Free the blocks held for these requests that have finished, because no other process will fetch them."""
        if self._sends:
            released = set(keys)
            for transfer_id in [each for each, key in self._sends.items() if key in released]:
                self._end_send(transfer_id)

    def needs_step(self, is_anything_in_flight: bool) -> bool:
        """Return whether to send a step to the workers although there is nothing to compute."""
        if self._has_updates or self.connector.needs_step():
            return True
        polls = self.connector.polls_workers and not is_anything_in_flight
        return polls and self.are_outstanding

    def add_metadata(self, step: SchedulerOutput) -> None:
        """Add the connector's metadata for the workers to a step."""
        self._has_updates = False
        step.kv_connector_metadata = self.connector.build_connector_meta(step)
        if self._unclean:
            step.cleared_blocks = int32_bytes(sorted(self._unclean))
            self._unclean.clear()
        self._checks.add_to_step(step)

    def take_stats(self) -> KVConnectorStats:
        """Return counts since the last call."""
        stats, self.stats = self.stats, KVConnectorStats()
        stats.counts = self.connector.take_stats()
        self.has_counts = False
        return stats

    # Before admission

    def match_external_prefix(self, request: Request, prefix: Prefix) -> ExternalMatch | None:
        """Return what the connector can load after a request's local prefix.

        Return None if the connector has no answer yet, or if the request failed.
        """
        if self.blocks is not None or prefix.is_reserved:
            return NOTHING_TO_LOAD
        if request.computes_locally or request.computes_whole_prompt or self._overdue:
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
                    f"get_num_new_matched_tokens returned {num_tokens!r}, expected 0 to {most} tokens"
                )
        except Exception as error:
            self._fail(request, error)
            return None
        if not is_async:
            num_tokens = min(num_tokens, request.num_tokens - prefix.num_tokens - 1)
        return ExternalMatch(num_tokens, is_async and num_tokens > 0)

    def find_longer_prefix(self, request: Request, prefix: Prefix) -> Prefix | Deferred | None:
        """Return a longer prefix than `prefix` if a `BlockConnector` can load its missing blocks, else None.

        Return `DEFERRED` if the connector has no answer yet.
        """
        connector = self.blocks
        if connector is None or prefix.is_reserved or request.computes_locally or self._overdue:
            return None
        if request.output_token_ids:
            self._manager.prefix_cache.hash_waiting_output(request)
        try:
            last_key = connector.last_block_key(request) if self._manager.tables.is_simple else b""
            found = self._manager.find_longer_prefix(
                request, prefix, lambda keys: connector.find_blocks(request, keys), last_key
            )
        except Exception as error:
            self._fail(request, error)
            return None
        if found is Deferred.DEFERRED:
            self._has_unanswered = True
        return found

    def update_after_alloc(
        self, request: Request, blocks: list[int], num_computed: int, num_tokens: int
    ) -> bool:
        """Report the blocks allocated for a load of `num_tokens` tokens after the computed ones to the connector.

        Return False if the connector raised an error, which fails the request and frees its blocks.
        """
        try:
            self.connector.update_state_after_alloc(request, blocks, num_tokens)
        except Exception as error:
            self._manager.pool.release_blocks(blocks)
            self._fail(request, error)
            return False
        self._checks.add_synchronous(blocks, num_computed, num_tokens)
        self._has_updates = True
        return True

    def start_load(self, load: ExternalLoad, tables: RequestBlocks) -> bool:
        """Start an asynchronous load into newly allocated `tables`.

        The load is held back while a step in flight may use one of its blocks. Return False if it
        failed the request.
        """
        request = load.request
        if last_step := self._find_last_use(load, tables):
            self._held_loads[request.transfer_id] = HeldLoad(load, last_step, set())
        else:
            try:
                self._begin_load(load, tables, set())
            except Exception as error:
                for table in tables:
                    self._manager.pool.release_blocks(list(filter(None, table)))
                self._fail(request, error)
                return False
        self._manager.reserve_blocks(request, tables)
        self._lifecycle.wait_for_load(request)
        return True

    def _begin_load(
        self, load: ExternalLoad, tables: RequestBlocks, invalid_blocks: set[int]
    ) -> None:
        """Start a load by reporting it to the connector. Errors of the connector are raised."""
        if self.blocks is not None:
            self.blocks.load_blocks(load.request, load.keys, load.blocks)
        else:
            (blocks,) = tables
            self.connector.update_state_after_alloc(load.request, blocks, load.num_external)
        self._checks.add_asynchronous(load, tables)
        started = self._loads[load.request.transfer_id] = LoadInProgress(load, invalid_blocks)
        self._new_loads.append(started)
        self._has_updates = True

    def _find_last_use(self, load: ExternalLoad, tables: RequestBlocks) -> int:
        """Return the last step in flight that may use a block to be loaded; 0 if there is none."""
        if not self._manager.tables.is_simple:
            # Sliding windows free blocks of running requests, and it is not recorded which steps still use them.
            steps = self._lifecycle.in_flight.steps
            return steps[-1].step if steps else 0
        blocks = load.blocks
        if self.blocks is None:
            first = (load.num_tokens - load.num_external) // self._manager.block_size
            blocks = tables[0][first:]
        return max((self._in_use.get(block, 0) for block in blocks), default=0)

    def record_vacated(self, slot: int, last_step: int) -> None:
        """Record that steps up to `last_step`, or none if 0, still use the blocks of a slot about to be freed."""
        if last_step:
            self._in_use.update(dict.fromkeys(self._manager.blocks[0][slot], last_step))

    def _mark_in_use(self, tables: Iterable[Iterable[int]]) -> None:
        """Record that the workers may still send the contents of these blocks, until a later step ends the transfer."""
        if steps := self._lifecycle.in_flight.steps:
            self._in_use.update(dict.fromkeys(chain.from_iterable(tables), steps[-1].step))

    def _begin_held_loads(self, step: int) -> None:
        """Start the loads that waited for the output of a step."""
        if self._in_use:
            self._in_use = {block: last for block, last in self._in_use.items() if last > step}
        for load, last_step, invalid_blocks in list(self._held_loads.values()):
            if last_step > step:
                continue
            transfer_id = load.request.transfer_id
            try:
                self._begin_load(load, self._manager.reserved[transfer_id], invalid_blocks)
            except Exception as error:
                self._fail(load.request, error)
                continue
            del self._held_loads[transfer_id]

    # When a request finishes

    def finish_request(self, request: Request, reason: FinishReason) -> RequestEnd:
        """Report a request to the connector before its blocks are freed. Errors of the connector are raised."""
        was = request.status
        blocks: list[int] = []
        if was is RequestStatus.RUNNING:
            blocks = self._manager.blocks[0][request.slot]
            request.num_held_tokens = self._lifecycle.running.slots.num_certain_tokens(request.slot)
        elif self._held_loads.pop(request.transfer_id, None) is not None:
            self._manager.release_reserved(request.transfer_id)
        elif was is RequestStatus.WAITING_FOR_REMOTE_KVS:
            blocks = self._manager.reserved[request.transfer_id][0]
        if self.blocks is None:
            self._has_updates = True
        end = self.connector.request_finished(request, list(blocks), reason)
        if end.delays_free and was is RequestStatus.RUNNING and blocks:
            self._manager.keep_blocks(request, len(blocks))
            self._sends[request.transfer_id] = request.key
            self._new_sends.append(request.transfer_id)
        return end

    # Reports from the workers

    def apply_report(
        self, step: StepInFlight, report: KVConnectorOutput | None, now: float
    ) -> None:
        """Apply the transfer results in a step output. Call this before the tokens of that step are applied."""
        if report is not None and report.invalid_block_ids:
            # Loads that are still held back did not write these blocks, even if they have been given them since.
            self._take_invalid(step, set(int32_view(report.invalid_block_ids).tolist()), now)
        self._begin_held_loads(step.step)
        if report is not None:
            self._apply_ends(report)
        for row in step.loading:
            if row.is_alive:
                row.request.has_untrusted_blocks = False
                slot = row.request.slot
                num_computed = int(self._lifecycle.running.slots.num_computed_tokens[slot])
                self._manager.cache_blocks(row.request, num_computed)

    def apply_message(self, rank: int, output: KVConnectorOutput, now: float) -> None:
        """Apply a report about asynchronous transfers that arrived without a step output."""
        self.has_counts = True
        if output.data:
            self.connector.receive(rank, output.data)
        if output.invalid_block_ids:
            invalid_blocks = int32_view(output.invalid_block_ids).tolist()
            for load in self._loads.values():
                load.invalid_blocks.update(invalid_blocks)
        self._apply_ends(output)

    def _apply_ends(self, report: KVConnectorOutput) -> None:
        for transfer_id in report.finished_sending:
            if self._sends.pop(transfer_id, None) is not None:
                self._manager.release_reserved(transfer_id)
        for transfer_id in report.finished_recving:
            load = self._loads.pop(transfer_id, None)
            if load is not None:
                self._end_load(load)
            elif transfer_id in self._overdue:
                self._overdue.remove(transfer_id)
                invalid_blocks = set(int32_view(report.invalid_block_ids).tolist())
                self._clear_invalid(OVERDUE - transfer_id, invalid_blocks)
                self._manager.release_reserved(OVERDUE - transfer_id)

    def _clear_invalid(self, transfer_id: int, invalid_blocks: set[int]) -> None:
        """Let the next step clear the invalid blocks of a load."""
        tables = self._manager.reserved[transfer_id]
        self._unclean |= invalid_blocks.intersection(chain.from_iterable(tables))

    def _end_load(self, load: LoadInProgress) -> None:
        (request, num_external, num_tokens, *_), invalid_blocks = load
        self._clear_invalid(request.transfer_id, invalid_blocks)
        if request.is_finished:
            self._manager.release_reserved(request.transfer_id)
            return
        tables = self._manager.reserved[request.transfer_id]
        bad = next((block for block in chain(*tables) if block in invalid_blocks), 0)
        if bad:
            self.stats.num_failed_loads += 1
            if self._may_fail(request):
                # The connector receives the blocks that the request holds, so they are released after that.
                self._fail_load(request, bad)
                self._manager.release_reserved(request.transfer_id)
                return
            request.computes_locally = True
            # Windows and recurrent states need other blocks for a shorter prefix, so no part of the load is kept.
            is_simple = self._manager.tables.is_simple
            num_valid = _num_valid_blocks(tables[0], invalid_blocks) if is_simple else 0
            num_lost = max(num_tokens - num_valid * self._manager.block_size, 0)
            num_tokens -= num_lost
            num_external = max(num_external - num_lost, 0)
        request.num_loaded_tokens = num_external
        self._lifecycle.requeue_loaded(request)
        self._reservations.add_reservation(request, num_tokens)

    def _take_invalid(self, step: StepInFlight, invalid_blocks: set[int], now: float) -> None:
        """Truncate every request that uses an invalid block to the tokens before the first such block."""
        for load in self._loads.values():
            load.invalid_blocks.update(invalid_blocks)
        lifecycle, manager = self._lifecycle, self._manager
        preempted = lifecycle.in_flight.preempted
        if bad := [row for row in preempted if not invalid_blocks.isdisjoint(row.blocks)]:
            lifecycle.drop_tokens_in_flight(bad)
        slots = lifecycle.running.slots
        live = step.batch.get_live_requests(slots)
        # Blocks of live requests may be shared with others. Those of ended ones may have been given to others since.
        shared = invalid_blocks.intersection(
            chain.from_iterable(manager.blocks[0][slot] for slot in live)
        )
        if shared:
            self._reservations.cut_back(shared)
            for held in self._held_loads.values():
                held.invalid_blocks.update(shared)
            for slot, other in enumerate(slots.requests):
                if other is not None and not shared.isdisjoint(manager.blocks[0][slot]):
                    live[slot] = other
        for slot, request in live.items():
            blocks = manager.blocks[0][slot]
            num_valid = _num_valid_blocks(blocks, invalid_blocks)
            if num_valid == len(blocks):
                continue
            self.stats.num_failed_loads += 1
            self._unclean |= invalid_blocks.intersection(blocks)
            bad_block = blocks[num_valid]
            manager.invalidate_blocks(request, num_valid)
            if self._may_fail(request):
                self._fail_load(request, bad_block)
                continue
            manager.keep_blocks(request, num_valid)
            lifecycle.preempt(slot, now, keeps_tokens=False)
            request.has_untrusted_blocks = False
            request.computes_locally = True
            self._reservations.add_reservation(request, num_valid * manager.block_size)

    def _may_fail(self, request: Request) -> bool:
        """Return whether a failed load may fail the request.

        A resubmitted request is computed instead, whatever the policy.
        """
        return self._policy is LoadFailurePolicy.FAIL and not request.is_resubmitted

    def _fail_load(self, request: Request, block: int) -> None:
        message = f"loading the KV cache of the request failed at block {block}"
        self._lifecycle.finish_request(request, FinishReason.ERROR, message=message)

    def _fail(self, request: Request, error: Exception) -> None:
        self._lifecycle.finish_request(
            request, FinishReason.ERROR, message=f"KV connector: {error}"
        )


def make_transfers(
    connector: KVConnector | None, config: KVTransferConfig | None, lifecycle: RequestLifecycle
) -> KVTransfers | None:
    """Return the transfers of a scheduler with a connector, or None without one.

    Raises:
        ConfigError: The connector does not support the model, or does not work together with CPU KV offload.
    """
    if config is None:
        return None
    assert connector is not None
    lifecycle.transfers = KVTransfers(connector, config, lifecycle)
    return lifecycle.transfers


def _num_valid_blocks(blocks: list[int], invalid_blocks: set[int]) -> int:
    """Return the number of blocks before the first invalid one."""
    if invalid_blocks.isdisjoint(blocks):
        return len(blocks)
    return next(index for index, block in enumerate(blocks) if block in invalid_blocks)
