"""Reports of a KV connector about a step arrive with its output, also if a device is still computing it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.config import DeviceConfig, KVTransferConfig
from engine.protocol.worker_messages import CheckedLoad
from support.checkpoints.tiny import qwen3_directory
from support.gpu.host_accelerator import HostAccelerator
from support.servers.faulty_connector import Load
from support.workers.worker_steps import Steps, output_of


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("transfer_id", [None, 7])
def test_blocks_that_a_connector_fills_with_nan_are_reported_and_cleared(
    tmp_path: Path, place: str, transfer_id: int | None
) -> None:
    path, model = qwen3_directory(tmp_path)
    transfer = KVTransferConfig(
        "Faulty",
        kv_connector_module_path="support.servers.faulty_connector",
        kv_connector_extra_config={"plan": str(tmp_path / "plan")},
    )
    steps = Steps(
        path,
        model.config.vocab_size,
        device=DeviceConfig(enforce_eager=True),
        accelerator=HostAccelerator() if place == "device" else None,
        transfer=transfer,
    )
    load = Load([2, 3], transfer_id)
    step = {
        "kv_connector_metadata": msgspec.msgpack.encode([load]),
        "checked_loads": [CheckedLoad(int32_bytes([2, 3]), transfer_id)],
    }
    new = steps.new(1, [5, 6, 7])
    report = output_of(steps.begin(new=[new], slots=[1], chunks=[0, 3], **step)).kv_connector_output
    assert report is not None
    assert report.finished_recving == ([] if transfer_id is None else [transfer_id])
    assert int32_view(report.invalid_block_ids).tolist() == [2, 3]
    memory = steps.runner.kv_cache.memory
    assert memory is not None
    for block in (2, 3):
        assert not any(map(any, memory.views(block)))
    assert steps.run(slots=[1]).kv_connector_output is None
