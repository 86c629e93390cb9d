"""The worker's half of the KV cache on disk, when the disk is full."""

from __future__ import annotations

import logging
import resource
from pathlib import Path

import msgspec
import pytest
import torch
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.config import CacheConfig, EngineConfig, KVTransferConfig, ModelConfig
from engine.protocol.kv_transfer.store import BlockLoad, StoreCommands, StoreReport
from engine.protocol.worker_messages import KVConnectorOutput
from engine.workers.kv_transfer.block_memory import BlockMemory
from engine.workers.kv_transfer.connector import ConnectorContext
from engine.workers.kv_transfer.disk.disk_connector import DiskConnector
from support.processes.program import wait_until

KEYS = [b"%032d" % number for number in range(6)]


def test_a_full_disk_turns_itself_off_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks that it has are computed again, and the KV cache in memory stays as it is."""
    pages = [torch.arange(16 * 64, dtype=torch.uint8).reshape(16, 64)]
    before = pages[0].clone()
    model = ModelConfig("m", "p", "t", ("m",), "llama", 9, 9, (2,))
    cache = CacheConfig(disk_path=str(tmp_path / "kv"), disk_gib=0.01)
    config = EngineConfig("", 1, model, cache)
    context = ConnectorContext(
        config, KVTransferConfig("disk"), 0, 0, BlockMemory(pages), b"f" * 32
    )
    connector = DiskConnector(context)
    outputs: list[KVConnectorOutput] = []

    def reports() -> list[StoreReport]:
        outputs.extend(connector.take_reports())
        return [
            msgspec.msgpack.decode(each.data, type=StoreReport) for each in outputs if each.data
        ]

    def store(number: int) -> None:
        commands = StoreCommands(stores=[KEYS[number]], store_blocks=int32_bytes([number]))
        connector.begin_step(msgspec.msgpack.encode(commands))
        wait_until(lambda: any(KEYS[number] in each.ended for each in reports()))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with caplog.at_level(logging.ERROR):
            for number in range(3):
                store(number)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [record.message.split(": ")[0] for record in caplog.records] == [
        "disabling the KV cache on disk"
    ]
    assert reports()[-1].is_off
    assert not any(each.num_bytes_written for each in reports())
    load = BlockLoad(5, [KEYS[0], KEYS[1]], int32_bytes([8, 9]))
    commands = StoreCommands(stores=[KEYS[3]], store_blocks=int32_bytes([3]), loads=[load])
    connector.begin_step(msgspec.msgpack.encode(commands))
    wait_until(lambda: any(KEYS[3] in each.ended for each in reports()))
    assert not any(each.finished_recving for each in outputs)
    connector.start_loads()
    wait_until(lambda: reports() is not None and any(each.finished_recving for each in outputs))
    (loaded,) = (each for each in outputs if each.finished_recving)
    assert sorted(int32_view(loaded.invalid_block_ids).tolist()) == [8, 9]
    assert torch.equal(pages[0], before)
    connector.close()
