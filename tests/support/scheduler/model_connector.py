"""Both halves of a KV connector to a store that contains every possible prefix.

Its answers are chosen by callables of the test, or at random.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from engine.core.kv_cache.connector import ExternalMatch, KVConnector, RequestEnd
from engine.core.scheduler.features.encoder_cache_connector import EncoderCacheConnector
from engine.core.state.request import Request
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.config import KVTransferConfig
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.protocol.messages import FinishReason
from engine.protocol.worker_messages import KVConnectorOutput, SchedulerOutput
from support.scheduler.fingerprints import BAD, fingerprints

UNDER_WAY = -2
"""The content of a block while an asynchronous load fills it."""


class Transfer(msgspec.Struct, array_like=True):
    """Positions [start, end) of a request, in `block_ids`."""

    transfer_id: int
    token_ids: bytes
    seed: int | None
    lora_name: str
    inputs: list[EncoderInput]
    block_ids: list[int]
    start: int
    end: int
    is_async: bool = False


class Metadata(msgspec.Struct, array_like=True):
    loads: list[Transfer]
    sends: list[Transfer]
    expired: list[int]


def load_nothing(request: Request, num_computed_tokens: int) -> ExternalMatch | None:
    return ExternalMatch(0)


class ModelConnector(KVConnector):
    def __init__(
        self,
        match: Callable[[Request, int], ExternalMatch | None] = load_nothing,
        delays_free: Callable[[Request], bool] = lambda request: False,
    ) -> None:
        self.match = match
        self.delays_free = delays_free
        self.ended: list[tuple[tuple[int, int], FinishReason]] = []
        self.expired: list[int] = []
        self._matched: dict[int, tuple[int, bool]] = {}
        self._metadata = Metadata([], [], [])

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> ExternalMatch | None:
        match = self.match(request, num_computed_tokens)
        if match is not None:
            self._matched[request.transfer_id] = num_computed_tokens, match.is_async
        return match

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        start, is_async = self._matched.pop(request.transfer_id)
        self._metadata.loads.append(
            _transfer(
                request, request.token_ids, block_ids, start, start + num_external_tokens, is_async
            )
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> bytes:
        metadata, self._metadata = self._metadata, Metadata([], [], [])
        if not (metadata.loads or metadata.sends or metadata.expired):
            return b""
        return msgspec.msgpack.encode(metadata)

    def request_finished(
        self, request: Request, block_ids: Sequence[int], reason: FinishReason
    ) -> RequestEnd:
        self.ended.append((request.key, reason))
        is_whole = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not (is_whole and block_ids and self.delays_free(request)):
            return RequestEnd()
        send = _transfer(request, request.prompt_token_ids, block_ids, 0, request.num_prompt_tokens)
        self._metadata.sends.append(send)
        return RequestEnd(True, {"remote_id": request.transfer_id})

    def transfer_expired(self, transfer_id: int) -> None:
        self.expired.append(transfer_id)
        self._metadata.expired.append(transfer_id)


def _transfer(
    request: Request,
    token_ids: bytes,
    block_ids: Sequence[int],
    start: int,
    end: int,
    is_async: bool = False,
) -> Transfer:
    return Transfer(
        request.transfer_id,
        token_ids,
        request.params.seed,
        request.lora.name if request.lora is not None else "",
        request.encoder_inputs,
        list(block_ids),
        start,
        end,
        is_async,
    )


@dataclass
class ModelTransfers:
    """The worker side: it fills blocks, and checks that blocks to be fetched do not change.

    `find_bad_blocks` gives the indices of a load's blocks that fail; `get_delay` the steps that a transfer takes.
    """

    kv_cache: list[list[int]]
    find_bad_blocks: Callable[[Transfer], set[int]] = lambda load: set()
    get_delay: Callable[[], int] = lambda: 1
    _under_way: list[tuple[int, Transfer, bool]] = field(default_factory=list)
    report: KVConnectorOutput = field(default_factory=KVConnectorOutput)
    invalid: list[int] = field(default_factory=list)

    def receive(self, metadata: bytes) -> None:
        """Receive a step: an asynchronous load may write at once, while earlier steps are computed."""
        if metadata:
            for load in msgspec.msgpack.decode(metadata, type=Metadata).loads:
                if load.is_async:
                    self._scribble(load)

    def _scribble(self, load: Transfer) -> None:
        size = len(self.kv_cache[0])
        for position in range(load.start, load.end):
            self.kv_cache[load.block_ids[position // size]][position % size] = UNDER_WAY

    def begin_step(self, metadata: bytes) -> None:
        if metadata:
            decoded = msgspec.msgpack.decode(metadata, type=Metadata)
            for send in decoded.sends:
                self._under_way.append((self.get_delay(), send, True))
            for load in decoded.loads:
                if load.is_async:
                    self._under_way.append((self.get_delay(), load, False))
                else:
                    self._load(load)
            self._under_way = [
                entry
                for entry in self._under_way
                if not entry[2] or entry[1].transfer_id not in decoded.expired
            ]

    def end_step(self) -> KVConnectorOutput | None:
        left = []
        for delay, transfer, is_send in self._under_way:
            if delay > 0:
                left.append((delay - 1, transfer, is_send))
            elif is_send:
                self._check(transfer)
                self.report.finished_sending.append(transfer.transfer_id)
            else:
                self._load(transfer)
                self.report.finished_recving.append(transfer.transfer_id)
        self._under_way = left
        report, self.report = self.report, KVConnectorOutput()
        if self.invalid:
            report.invalid_block_ids = int32_bytes(self.invalid)
            self.invalid = []
        return report if report != KVConnectorOutput() else None

    def _load(self, load: Transfer) -> None:
        values = self._values(load)
        if load.is_async:
            size = len(self.kv_cache[0])
            places = (divmod(position, size) for position in range(load.start, load.end))
            found = {self.kv_cache[load.block_ids[index]][offset] for index, offset in places}
            assert found == {UNDER_WAY}, "a block was written to during its load"
        bad = {index for index in self.find_bad_blocks(load) if self._has(load, index)}
        size = len(self.kv_cache[0])
        for position in range(load.start, load.end):
            index, offset = divmod(position, size)
            block = load.block_ids[index]
            self.kv_cache[block][offset] = BAD if index in bad else values[position]
        self.invalid += [load.block_ids[index] for index in sorted(bad)]

    def _has(self, load: Transfer, index: int) -> bool:
        size = len(self.kv_cache[0])
        return load.start // size <= index <= (load.end - 1) // size

    def _check(self, send: Transfer) -> None:
        values = self._values(send)
        size = len(self.kv_cache[0])
        for position in range(send.start, send.end):
            index, offset = divmod(position, size)
            found = self.kv_cache[send.block_ids[index]][offset]
            assert found == values[position], "a block was overwritten before it was fetched"

    @staticmethod
    def _values(transfer: Transfer) -> list[int]:
        tokens = int32_view(transfer.token_ids).tolist()
        return fingerprints(tokens, transfer.seed, transfer.lora_name, transfer.inputs)


def chance_connector(rng: random.Random) -> ModelConnector:
    """Return a connector with random answers of every kind, a few of them invalid."""

    def match(request: Request, num_computed_tokens: int) -> ExternalMatch | None:
        draw = rng.random()
        if draw < 0.15:
            return None
        if draw < 0.16:
            raise RuntimeError("the store is not reachable")
        if draw < 0.17:
            return ExternalMatch(request.num_tokens + 1)
        num_left = request.num_tokens - num_computed_tokens
        num_tokens = rng.choice((0, num_left, rng.randrange(num_left + 1)))
        return ExternalMatch(num_tokens, rng.random() < 0.5)

    return ModelConnector(match, lambda request: rng.random() < 0.3)


class ChanceEncoderCache(EncoderCacheConnector):
    """A cache that has an output half of the time, and sometimes fails."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def has_cache_item(self, request: Request, index: int) -> bool:
        draw = self._rng.random()
        if draw < 0.02:
            raise RuntimeError("the cache is not reachable")
        return draw < 0.5

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput, loads: Sequence[tuple[Request, int]]
    ) -> bytes:
        return b"%d" % len(loads)


def find_bad_blocks_by_chance(rng: random.Random) -> Callable[[Transfer], set[int]]:
    def find_bad_blocks(load: Transfer) -> set[int]:
        if rng.random() < 0.7:
            return set()
        return {rng.randrange(len(load.block_ids)) for _ in range(rng.choice((1, 2)))}

    return find_bad_blocks


class ConfiguredConnector(ModelConnector):
    """A connector that is created from its configuration."""

    def __init__(self, config: KVTransferConfig) -> None:
        super().__init__()
        self.config = config
