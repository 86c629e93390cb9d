"""A KV connector that fills blocks with NaN and reports success, and that fails in any of its calls.

Both halves read a `Plan` from the file `plan` of `kv_connector_extra_config` in each call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec
from engine.core.kv_cache.connector import ExternalMatch, KVConnector, RequestEnd
from engine.core.state.request import Request
from engine.protocol.config import KVTransferConfig
from engine.protocol.messages import FinishReason
from engine.protocol.worker_messages import KVConnectorOutput, SchedulerOutput
from engine.workers.kv_transfer.connector import ConnectorContext
from engine.workers.kv_transfer.connector import KVConnector as WorkerConnector

BLOCK_SIZE = 16

Method = TypeVar("Method", bound=Callable[..., Any])


class Plan(msgspec.Struct):
    """The kind of load, and the call that fails once: it raises an error, exits, or does not return."""

    load: Literal["none", "synchronous", "asynchronous"] = "none"
    call: str = ""
    fault: Literal["raise", "exit", "hang"] = "raise"

    def write(self, path: Path) -> None:
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(self))
        new.rename(path)


def read_plan(config: KVTransferConfig) -> Plan:
    path = Path(cast(str, config.kv_connector_extra_config["plan"]))
    return msgspec.json.decode(path.read_bytes(), type=Plan) if path.exists() else Plan()


def fails(method: Method) -> Method:
    """Let a method fail once if the plan says so."""

    def call(self: Any, *args: Any) -> Any:
        plan = read_plan(self.config)
        if plan.call == f"{type(self).__name__}.{method.__name__}":
            Plan(plan.load).write(Path(self.config.kv_connector_extra_config["plan"]))
            if plan.fault == "raise":
                raise RuntimeError("the planned fault")
            if plan.fault == "exit":
                os._exit(9)
            threading.Event().wait()
        return method(self, *args)

    return cast(Method, call)


class Load(msgspec.Struct, array_like=True):
    blocks: list[int]
    transfer_id: int | None


class Faulty(KVConnector):
    def __init__(self, config: KVTransferConfig) -> None:
        self.config = config
        self._loads: list[Load] = []
        self._computed: dict[int, int] = {}

    @fails
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> ExternalMatch | None:
        num_left = (request.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE - num_computed_tokens
        plan = read_plan(self.config)
        if plan.load == "none" or num_left <= 0:
            return ExternalMatch(0)
        self._computed[request.transfer_id] = num_computed_tokens
        return ExternalMatch(num_left, plan.load == "asynchronous")

    @fails
    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        first = self._computed.pop(request.transfer_id) // BLOCK_SIZE
        is_async = read_plan(self.config).load == "asynchronous"
        loaded = list(block_ids)[first : first + num_external_tokens // BLOCK_SIZE]
        self._loads.append(Load(loaded, request.transfer_id if is_async else None))

    @fails
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> bytes:
        loads, self._loads = self._loads, []
        return msgspec.msgpack.encode(loads) if loads else b""

    @fails
    def needs_step(self) -> bool:
        return False

    @fails
    def request_finished(
        self, request: Request, block_ids: Sequence[int], reason: FinishReason
    ) -> RequestEnd:
        return RequestEnd()


class FaultyWorker(WorkerConnector):
    def __init__(self, context: ConnectorContext) -> None:
        self.config = context.transfer
        self._memory = context.memory
        self._event = os.eventfd(0, os.EFD_NONBLOCK)
        self._ended: list[int] = []

    @property
    def fd(self) -> int:
        return self._event

    @fails
    def begin_step(self, metadata: bytes) -> None:
        loads = msgspec.msgpack.decode(metadata, type=list[Load]) if metadata else []
        for load in loads:
            for block in load.blocks:
                for part in self._memory.views(block):
                    part[:] = b"\xff" * len(part)
            if load.transfer_id is not None:
                self._ended.append(load.transfer_id)

    @fails
    def start_loads(self) -> None:
        pass

    @fails
    def end_step(self) -> KVConnectorOutput | None:
        ended, self._ended = self._ended, []
        return KVConnectorOutput(finished_recving=ended) if ended else None

    @fails
    def take_reports(self) -> list[KVConnectorOutput]:
        return []

    @fails
    def reset(self) -> None:
        self._ended.clear()

    @fails
    def close(self) -> None:
        os.close(self._event)
