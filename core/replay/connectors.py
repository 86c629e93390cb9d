"""KV and encoder-cache connectors that record their answers, and replacements that repeat recorded answers.

The recording connectors validate each answer, or raise, so that a replay gets exactly what the scheduler got.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import index as as_integer
from typing import Final

import msgspec

from ...protocol.errors import EngineError
from ...protocol.messages import FinishReason
from ...protocol.worker_messages import SchedulerOutput
from ..kv_cache.connector import BlockConnector, ExternalMatch, KVConnector, RequestEnd
from ..scheduler.features.encoder_cache_connector import EncoderCacheConnector
from ..state.external_dependency import ExternalDependency
from ..state.forwarded import forwarded
from ..state.request import Request
from .events import (
    Answer,
    BlocksFound,
    CacheItemFound,
    ConnectorRaised,
    DelaysFree,
    Matched,
    NeedsStep,
)
from .log import EventLog

NO_TRANSFER: Final = -1
"""The transfer id of calls that do not concern a single request."""

_encode = msgspec.msgpack.Encoder().encode
_decode_params = msgspec.msgpack.Decoder(dict[str, object] | None).decode


class RecordedError(EngineError):
    """Raised by a replay where the recorded connector raised an error."""


class RecordedKVConnector(KVConnector, ExternalDependency):
    """A KV connector that forwards each call to another one, and records its answers and errors."""

    def __init__(self, connector: KVConnector, log: EventLog) -> None:
        self.connector = connector
        self.polls_workers = connector.polls_workers
        self._log = log

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> ExternalMatch | None:
        """Return and record the connector's match, converted to an `ExternalMatch`."""
        with _recording_errors(self._log, "get_num_new_matched_tokens", request.transfer_id):
            match = self.connector.get_num_new_matched_tokens(request, num_computed_tokens)
            if match is not None:
                num_tokens, is_async = match
                match = ExternalMatch(as_integer(num_tokens), bool(is_async))
        if match is None:
            self._log.add_event(Matched(request.transfer_id, None))
        else:
            # Clamp out-of-range numbers. The scheduler rejects them in the same way, and some are too large to encode.
            num_tokens = max(-1, min(match.num_tokens, request.num_tokens + 1))
            self._log.add_event(Matched(request.transfer_id, num_tokens, match.is_async))
        return match

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Forward the call. Record an error if it raises one."""
        with _recording_errors(self._log, "update_state_after_alloc", request.transfer_id):
            self.connector.update_state_after_alloc(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> bytes:
        """Return the connector's metadata for the step. Record an error if it raises one."""
        with _recording_errors(self._log, "build_connector_meta", NO_TRANSFER):
            return self.connector.build_connector_meta(scheduler_output)

    def request_finished(
        self, request: Request, block_ids: Sequence[int], reason: FinishReason
    ) -> RequestEnd:
        """Return the connector's decision on a request's blocks and record whether they stay held."""
        with _recording_errors(self._log, "request_finished", request.transfer_id):
            delays_free, params = self.connector.request_finished(request, block_ids, reason)
            # If its parameters cannot be encoded, only this request may fail, so encode them here.
            params = _decode_params(_encode(params))
        if delays_free:
            self._log.add_event(DelaysFree(request.transfer_id))
        return RequestEnd(bool(delays_free), params)

    def transfer_expired(self, transfer_id: int) -> None:
        """Forward the call. Record an error if it raises one."""
        with _recording_errors(self._log, "transfer_expired", transfer_id):
            self.connector.transfer_expired(transfer_id)

    def needs_step(self) -> bool:
        """Return whether the connector needs a step, and record it if so."""
        needs_step = self.connector.needs_step()
        if needs_step:
            self._log.add_event(NeedsStep())
        return needs_step

    # No decision depends on the answers of these, so they are not recorded.
    is_ready = forwarded(KVConnector.is_ready, to="connector")
    is_flushed = forwarded(KVConnector.is_flushed, to="connector")
    receive = forwarded(KVConnector.receive, to="connector")
    request_refused = forwarded(KVConnector.request_refused, to="connector")
    take_events = forwarded(KVConnector.take_events, to="connector")
    take_stats = forwarded(KVConnector.take_stats, to="connector")
    shutdown = forwarded(KVConnector.shutdown, to="connector")


class RecordedBlockConnector(RecordedKVConnector, BlockConnector):
    """A `BlockConnector` that forwards each call to another one, and records its answers and errors."""

    def __init__(self, connector: BlockConnector, log: EventLog) -> None:
        super().__init__(connector, log)
        self._blocks = connector

    def find_blocks(self, request: Request, keys: Sequence[bytes]) -> bytes | None:
        """Return a byte per block, 1 if the connector can load it, and record the answer."""
        with _recording_errors(self._log, "find_blocks", request.transfer_id):
            mask = self._blocks.find_blocks(request, keys)
        if mask != b"":
            self._log.add_event(BlocksFound(request.transfer_id, mask))
            self._log.num_bytes += len(mask or b"")
        return mask

    def load_blocks(
        self, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> None:
        """Forward the call. Record an error if it raises one."""
        with _recording_errors(self._log, "load_blocks", request.transfer_id):
            self._blocks.load_blocks(request, keys, block_ids)

    observe_pool = forwarded(BlockConnector.observe_pool, to="connector")
    blocks_cached = forwarded(BlockConnector.blocks_cached, to="connector")
    block_evicted = forwarded(BlockConnector.block_evicted, to="connector")
    copy_dropped = forwarded(BlockConnector.copy_dropped, to="connector")
    blocks_removed = forwarded(BlockConnector.blocks_removed, to="connector")
    cache_cleared = forwarded(BlockConnector.cache_cleared, to="connector")


def record_connector(connector: KVConnector, log: EventLog) -> RecordedKVConnector:
    """Return a connector of the same kind that forwards to `connector` and records its answers."""
    if isinstance(connector, BlockConnector):
        return RecordedBlockConnector(connector, log)
    return RecordedKVConnector(connector, log)


class RecordedEncoderCacheConnector(EncoderCacheConnector, ExternalDependency):
    """An encoder-cache connector that forwards each call to another one, and records its answers and errors."""

    def __init__(self, connector: EncoderCacheConnector, log: EventLog) -> None:
        self._connector = connector
        self._log = log

    def has_cache_item(self, request: Request, index: int) -> bool:
        """Return whether the connector has the encoder output, and record the answer."""
        with _recording_errors(self._log, "has_cache_item", request.transfer_id):
            found = bool(self._connector.has_cache_item(request, index))
        self._log.add_event(CacheItemFound(request.transfer_id, index, found))
        return found

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput, loads: Sequence[tuple[Request, int]]
    ) -> bytes:
        """Return the connector's metadata for the step. Record an error if it raises one."""
        with _recording_errors(self._log, "encoder build_connector_meta", NO_TRANSFER):
            return self._connector.build_connector_meta(scheduler_output, loads)


@contextmanager
def _recording_errors(log: EventLog, call: str, transfer_id: int) -> Iterator[None]:
    try:
        yield
    except Exception:
        log.add_event(ConnectorRaised(call, transfer_id))
        raise


class ReplayedKVConnector(KVConnector, ExternalDependency):
    """A KV connector that takes its answers from the front of `answers`, the recorded ones.

    Where no answer was recorded, it reports no match and frees blocks immediately.
    """

    def __init__(self, answers: deque[Answer], *, polls_workers: bool = True) -> None:
        self._answers = answers
        self.polls_workers = polls_workers

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> ExternalMatch | None:
        """Return the recorded match, or no tokens if none was recorded."""
        _raise_recorded_error(self._answers, "get_num_new_matched_tokens", request.transfer_id)
        match self._answers:
            case [Matched(request.transfer_id, num_tokens, is_async), *_]:
                self._answers.popleft()
                return None if num_tokens is None else ExternalMatch(num_tokens, is_async)
        return ExternalMatch(0)

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Raise RecordedError if the recorded call raised."""
        _raise_recorded_error(self._answers, "update_state_after_alloc", request.transfer_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> bytes:
        """Return empty metadata, or raise RecordedError if the recorded call raised."""
        _raise_recorded_error(self._answers, "build_connector_meta", NO_TRANSFER)
        return b""

    def request_finished(
        self, request: Request, block_ids: Sequence[int], reason: FinishReason
    ) -> RequestEnd:
        """Return whether the recorded connector delayed freeing the request's blocks."""
        _raise_recorded_error(self._answers, "request_finished", request.transfer_id)
        delays_free = _pop_if_next(self._answers, DelaysFree(request.transfer_id))
        return RequestEnd(delays_free)

    def transfer_expired(self, transfer_id: int) -> None:
        """Raise RecordedError if the recorded call raised."""
        _raise_recorded_error(self._answers, "transfer_expired", transfer_id)

    def needs_step(self) -> bool:
        """Return whether the recorded connector needed a step."""
        return _pop_if_next(self._answers, NeedsStep())


class ReplayedBlockConnector(ReplayedKVConnector, BlockConnector):
    """A `BlockConnector` that takes its answers from the front of `answers`, the recorded ones.

    Where no answer was recorded, it has no blocks.
    """

    def find_blocks(self, request: Request, keys: Sequence[bytes]) -> bytes | None:
        """Return the recorded answer, or b"" if none was recorded."""
        _raise_recorded_error(self._answers, "find_blocks", request.transfer_id)
        match self._answers:
            case [BlocksFound(request.transfer_id, mask), *_]:
                self._answers.popleft()
                return mask
        return b""

    def load_blocks(
        self, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> None:
        """Raise RecordedError if the recorded call raised."""
        _raise_recorded_error(self._answers, "load_blocks", request.transfer_id)


class ReplayedEncoderCacheConnector(EncoderCacheConnector, ExternalDependency):
    """An encoder-cache connector that takes its answers from the front of `answers`, the recorded ones."""

    def __init__(self, answers: deque[Answer]) -> None:
        self._answers = answers

    def has_cache_item(self, request: Request, index: int) -> bool:
        """Return the recorded answer, or False if none was recorded."""
        _raise_recorded_error(self._answers, "has_cache_item", request.transfer_id)
        if _pop_if_next(self._answers, CacheItemFound(request.transfer_id, index, True)):
            return True
        _pop_if_next(self._answers, CacheItemFound(request.transfer_id, index, False))
        return False

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput, loads: Sequence[tuple[Request, int]]
    ) -> bytes:
        """Return empty metadata, or raise RecordedError if the recorded call raised."""
        _raise_recorded_error(self._answers, "encoder build_connector_meta", NO_TRANSFER)
        return b""


def _pop_if_next(answers: deque[Answer], answer: Answer) -> bool:
    """Remove `answer` if it is the next one. Return whether it was."""
    if answers and answers[0] == answer:
        answers.popleft()
        return True
    return False


def _raise_recorded_error(answers: deque[Answer], call: str, transfer_id: int) -> None:
    if _pop_if_next(answers, ConnectorRaised(call, transfer_id)):
        raise RecordedError(f"the connector's {call} raised an error, whose text was not recorded")
