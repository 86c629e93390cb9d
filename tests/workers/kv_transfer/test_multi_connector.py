"""The worker side of several KV connectors: their reports in one."""

from __future__ import annotations

import os

import msgspec
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.config import EngineConfig, KVTransferConfig
from engine.protocol.kv_transfer.multi import MULTI_CONNECTOR, MultiCommands
from engine.protocol.worker_messages import KVConnectorOutput
from engine.workers.kv_transfer.connector import (
    ConnectorContext,
    KVConnector,
    create_connector,
    register_connector,
)


class Child(KVConnector):
    """A connector whose reports the test makes."""

    def __init__(self, context: ConnectorContext) -> None:
        self._fd = os.eventfd(0)
        self.received: list[bytes] = []
        self.received_at_start: list[list[bytes]] = []
        self.reports: list[KVConnectorOutput] = []
        children.append(self)

    @property
    def fd(self) -> int:
        return self._fd

    def begin_step(self, metadata: bytes) -> None:
        self.received.append(metadata)

    def start_loads(self) -> None:
        # A load may replace blocks that others copy in `begin_step`.
        self.received_at_start = [list(child.received) for child in children]

    def take_reports(self) -> list[KVConnectorOutput]:
        reports, self.reports = self.reports, []
        return reports

    def reset(self) -> None:
        self.reports.clear()

    def close(self) -> None:
        os.close(self._fd)


children: list[Child] = []

register_connector("child", Child)


def test_a_shared_load_ends_once_after_its_lost_blocks_are_reported() -> None:
    children.clear()
    transfer = KVTransferConfig(
        MULTI_CONNECTOR,
        kv_connector_extra_config={"connectors": [{"kv_connector": "child"}] * 3},
    )
    context = ConnectorContext(
        EngineConfig(model="", run_dir="", epoch=1), transfer, 0, 0, None, b""
    )  # type: ignore[arg-type]
    multi = create_connector(context)
    commands = MultiCommands([b"a", b"b", b""], [(7, 2)], int32_bytes([4, 5]))
    multi.begin_step(msgspec.msgpack.encode(commands))
    multi.start_loads()
    assert all(child.received_at_start == [[b"a"], [b"b"], [b""]] for child in children)
    children[1].reports.append(KVConnectorOutput(finished_recving=[7]))
    invalid: list[int] = []
    for report in multi.take_reports():
        assert not report.finished_recving
        invalid += int32_view(report.invalid_block_ids).tolist()
    assert invalid == [4, 5]
    children[0].reports.append(
        KVConnectorOutput(finished_recving=[7], invalid_block_ids=int32_bytes([6]))
    )
    (report,) = multi.take_reports()
    assert report.finished_recving == [7]
    assert int32_view(report.invalid_block_ids).tolist() == [6]
    multi.close()
