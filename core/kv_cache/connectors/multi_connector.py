"""The scheduler side of `MultiConnector`, a KV connector that combines several others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from ....protocol.arrays import int32_bytes
from ....protocol.config import KVTransferConfig
from ....protocol.errors import ConfigError
from ....protocol.kv_events import KVCacheEvent
from ....protocol.kv_transfer.multi import (
    MULTI_CONNECTOR,
    MultiCommands,
    MultiReport,
    child_configs,
)
from ....protocol.messages import FinishReason
from ....protocol.worker_messages import SchedulerOutput
from ...state.forwarded import forwarded_to_all
from ...state.request import Request
from ..connector import BlockConnector, RequestEnd, create_connector, register_connector

_decode_report = msgspec.msgpack.Decoder(MultiReport).decode
_encode = msgspec.msgpack.Encoder().encode


class MultiConnector(BlockConnector):
    """Loads each block from the first connector that has it. All connectors see every change of the prefix cache.

    When a request ends, at most one of them may keep its blocks.
    """

    def __init__(self, connectors: Sequence[BlockConnector]) -> None:
        self.connectors = list(connectors)
        self.polls_workers = any(each.polls_workers for each in connectors)
        self._owners: dict[int, dict[bytes, int]] = {}
        """The connector that found each block, by request and key, until the load of the block starts."""
        self._loads: list[tuple[int, int]] = []
        self._lost_blocks: list[int] = []

    def find_blocks(self, request: Request, keys: Sequence[bytes]) -> bytes | None:
        """Return a byte for each key: 1 if any connector can load the block. None if one of them defers its answer."""
        owners: dict[bytes, int] = {}
        left = list(keys)
        for number, connector in enumerate(self.connectors):
            mask = connector.find_blocks(request, left) if left else b""
            if mask is None:
                return None
            if mask:
                found = [key for key, is_found in zip(left, mask, strict=True) if is_found]
                owners.update(dict.fromkeys(found, number))
                left = [key for key, is_found in zip(left, mask, strict=True) if not is_found]
        if not owners:
            self._owners.pop(request.transfer_id, None)
            return b""
        self._owners[request.transfer_id] = owners
        return bytes(key in owners for key in keys)

    def last_block_key(self, request: Request) -> bytes:
        """Return the first connector's key of the block with the last tokens, if any has one."""
        return next(filter(None, (each.last_block_key(request) for each in self.connectors)), b"")

    def load_blocks(
        self, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> None:
        """Load each block with the connector that found it.

        If a connector raises an error after others have begun to load, its blocks are reported as not loaded. The
        blocks of the request stay in use until the others have ended. If none has begun, the error is raised.
        """
        owners = self._owners.pop(request.transfer_id)
        num_begun = 0
        lost: list[int] = []
        errors: list[Exception] = []
        for number in sorted({owners[key] for key in keys}):
            chosen = [
                (key, block)
                for key, block in zip(keys, block_ids, strict=True)
                if owners[key] == number
            ]
            blocks = [block for _, block in chosen]
            try:
                self.connectors[number].load_blocks(request, [key for key, _ in chosen], blocks)
                num_begun += 1
            except Exception as error:
                errors.append(error)
                lost += blocks
        if errors and not num_begun:
            raise errors[0]
        self._loads.append((request.transfer_id, num_begun))
        self._lost_blocks += lost

    def request_finished(
        self, request: Request, block_ids: Sequence[int], reason: FinishReason
    ) -> RequestEnd:
        """Keep the blocks if one of the connectors does, and return its answer.

        An error of a connector is raised after the others have received the end.

        Raises:
            ValueError: Several connectors would keep them.
        """
        self._owners.pop(request.transfer_id, None)
        ends: list[RequestEnd] = []
        errors: list[Exception] = []
        for each in self.connectors:
            try:
                ends.append(each.request_finished(request, block_ids, reason))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        if sum(end.delays_free for end in ends) > 1:
            raise ValueError("several connectors hold blocks of the same request")
        params = (end.params for end in ends if end.params is not None)
        return RequestEnd(any(end.delays_free for end in ends), next(params, None))

    def blocks_removed(self, keys: Iterable[bytes]) -> None:
        """Forward the notification to all connectors."""
        keys = list(keys)
        for each in self.connectors:
            each.blocks_removed(keys)

    def needs_step(self) -> bool:
        """Return whether any connector has metadata for the workers."""
        return bool(self._loads) or any(each.needs_step() for each in self.connectors)

    def is_ready(self) -> bool:
        """Return whether all connectors are ready."""
        return all(each.is_ready() for each in self.connectors)

    def is_flushed(self) -> bool:
        """Return whether all connectors have stored everything, so that the workers may exit."""
        return all(each.is_flushed() for each in self.connectors)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> bytes:
        """Return the metadata of all connectors in one message."""
        metadata = [each.build_connector_meta(scheduler_output) for each in self.connectors]
        loads, self._loads = self._loads, []
        lost, self._lost_blocks = int32_bytes(self._lost_blocks), []
        # A connector may start its part of a load with the metadata of a later step.
        if not (loads or any(metadata)):
            return b""
        return _encode(MultiCommands(metadata, loads, lost))

    def receive(self, rank: int, data: bytes) -> None:
        """Forward a report to the connector that it is addressed to."""
        report = _decode_report(data)
        self.connectors[report.connector].receive(rank, report.data)

    def take_events(self) -> list[KVCacheEvent]:
        """Return the events of all connectors."""
        return [event for each in self.connectors for event in each.take_events()]

    def take_stats(self) -> dict[str, float]:
        """Return the counts of all connectors, summed by name."""
        counts: Counter[str] = Counter()
        for each in self.connectors:
            for name, count in each.take_stats().items():
                counts[name] += count  # type: ignore[assignment]
        return dict(counts)

    request_refused = forwarded_to_all(BlockConnector.request_refused, to="connectors")
    transfer_expired = forwarded_to_all(BlockConnector.transfer_expired, to="connectors")
    observe_pool = forwarded_to_all(BlockConnector.observe_pool, to="connectors")
    blocks_cached = forwarded_to_all(BlockConnector.blocks_cached, to="connectors")
    block_evicted = forwarded_to_all(BlockConnector.block_evicted, to="connectors")
    copy_dropped = forwarded_to_all(BlockConnector.copy_dropped, to="connectors")
    cache_cleared = forwarded_to_all(BlockConnector.cache_cleared, to="connectors")
    shutdown = forwarded_to_all(BlockConnector.shutdown, to="connectors")


def _create(config: KVTransferConfig) -> MultiConnector:
    connectors = []
    for child in child_configs(config):
        connector = create_connector(child)
        if not isinstance(connector, BlockConnector):
            raise ConfigError(
                f"kv_connector={child.kv_connector!r} is not a subclass of BlockConnector, so it cannot be combined "
                "with others"
            )
        connectors.append(connector)
    return MultiConnector(connectors)


register_connector(MULTI_CONNECTOR, _create)
