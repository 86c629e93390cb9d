"""The direct connector between two workers, over real sockets: each block arrives, or is reported as missing."""

from __future__ import annotations

import multiprocessing
import signal
import socket
from collections.abc import Iterator
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from pathlib import Path

import msgspec
import pytest
import torch
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.cluster_key import ClusterKey
from engine.protocol.config import EngineConfig, KVTransferConfig, ModelConfig, ParallelConfig
from engine.protocol.errors import ConfigError
from engine.protocol.kv_transfer.direct import DirectCommands, DirectFetch, DirectSource
from engine.protocol.worker_messages import KVConnectorOutput
from engine.workers.kv_transfer import block_server
from engine.workers.kv_transfer.block_memory import BlockMemory
from engine.workers.kv_transfer.connector import ConnectorContext
from engine.workers.kv_transfer.direct_connector import DirectConnector
from support.processes.program import wait_until

NUM_BLOCKS, PAGE_BYTES, NUM_PAGES = 96, 64, 3
KEYS = [b"%032d" % number for number in range(NUM_BLOCKS)]
FINGERPRINT = b"f" * 32


class Side:
    """A worker's connector and its KV cache, filled with a byte."""

    def __init__(
        self,
        config: EngineConfig,
        replica: int,
        byte: int,
        transfer: KVTransferConfig | None = None,
        fingerprint: bytes = FINGERPRINT,
    ) -> None:
        self.pages = [
            torch.full((NUM_BLOCKS, PAGE_BYTES), byte, dtype=torch.uint8) for _ in range(NUM_PAGES)
        ]
        transfer = transfer or KVTransferConfig("direct")
        context = ConnectorContext(
            config, transfer, replica, 0, BlockMemory(self.pages), fingerprint
        )
        self.connector = DirectConnector(context)

    def command(self, commands: DirectCommands) -> None:
        self.connector.begin_step(msgspec.msgpack.encode(commands))
        self.connector.start_loads()

    def offer(self, numbers: range) -> None:
        for number in numbers:
            for layer, page in enumerate(self.pages):
                page[number] = (number + layer) % 251
        blocks = int32_bytes(list(numbers))
        self.command(DirectCommands(offered=[KEYS[n] for n in numbers], offered_blocks=blocks))

    def fetch(self, source: DirectSource, numbers: range, transfer_id: int = 7) -> None:
        """Fetch blocks into those at the other end of the cache."""
        blocks = int32_bytes([NUM_BLOCKS - 1 - number for number in numbers])
        keys = [KEYS[number] for number in numbers]
        self.command(DirectCommands(fetches=[DirectFetch(transfer_id, source, keys, blocks)]))

    def wait(self) -> KVConnectorOutput:
        reports: list[KVConnectorOutput] = []

        def has_report() -> bool:
            reports.extend(self.connector.take_reports())
            return bool(reports)

        wait_until(has_report, what="a report")
        (report,) = reports
        return report

    def missing(self) -> list[int]:
        """Wait for the end of the fetch, and return the numbers of the blocks that did not arrive."""
        report = self.wait()
        assert report.finished_recving == [7]
        return sorted(
            NUM_BLOCKS - 1 - block for block in int32_view(report.invalid_block_ids).tolist()
        )

    def check(self, numbers: range) -> None:
        for number in numbers:
            for layer, page in enumerate(self.pages):
                assert set(page[NUM_BLOCKS - 1 - number].tolist()) == {(number + layer) % 251}


def config_in(path: Path, key: str | None = None) -> EngineConfig:
    parallel = ParallelConfig(data_parallel_size=2, cluster_key=key)
    return EngineConfig(
        str(path), 1, ModelConfig("m", "p", "t", ("m",), "llama", 9, 9, (2,)), parallel=parallel
    )


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[tuple[Side, Side]]:
    config = config_in(tmp_path)
    pair = Side(config, 0, 1), Side(config, 1, 2)
    yield pair
    for side in pair:
        side.connector.close()


def test_blocks_arrive_whole_even_if_they_are_offered_later(sides: tuple[Side, Side]) -> None:
    source, target = sides
    source.offer(range(40))
    target.fetch(DirectSource("r", 0), range(64))
    source.offer(range(40, 64))
    assert target.missing() == []
    target.check(range(64))
    assert set(target.pages[0][0].tolist()) == {2}


def test_blocks_that_never_come_are_missing_once_their_request_ends(
    sides: tuple[Side, Side],
) -> None:
    source, target = sides
    source.offer(range(5))
    source.command(DirectCommands(withdrawn=[KEYS[2]]))
    target.fetch(DirectSource("r", 0), range(10))
    source.command(DirectCommands(held=[("r", 3)]))
    assert target.missing()[0] == 2
    target.check(range(2))
    # The fetch has ended, so its blocks do not have to be held anymore.
    assert source.wait().finished_sending == [3]


def test_the_last_block_of_a_request_is_offered_until_it_is_fetched(
    sides: tuple[Side, Side],
) -> None:
    source, target = sides
    source.offer(range(4))
    target.fetch(DirectSource("request", 0), range(5))
    for layer, page in enumerate(source.pages):
        page[4] = 4 + layer
    source.command(DirectCommands(held=[("request", 3)], last_blocks=[(3, KEYS[4], 4)]))
    assert target.missing() == []
    target.check(range(5))
    assert source.wait().finished_sending == [3]
    target.fetch(DirectSource("request", 0), range(5))
    assert target.missing() == [4]


def test_the_last_block_of_an_expired_request_is_withdrawn(sides: tuple[Side, Side]) -> None:
    source, target = sides
    source.command(DirectCommands(held=[("request", 3)], last_blocks=[(3, KEYS[4], 4)]))
    source.command(DirectCommands(expired=[3]))
    target.fetch(DirectSource("request", 0), range(4, 5))
    assert target.missing() == [4]


def test_blocks_of_an_exited_core_are_missing_at_once(sides: tuple[Side, Side]) -> None:
    """The next core of the source does not know the request, so no end of it is ever reported."""
    source, target = sides
    source.connector.epoch = 4
    source.connector.reset()
    source.offer(range(2))
    target.fetch(DirectSource("r", 0, epoch=3), range(4))
    assert target.missing()[-2:] == [2, 3]
    # Those of the current core may still be computed.
    target.fetch(DirectSource("r", 0, epoch=4), range(4))
    source.offer(range(2, 4))
    assert target.missing() == []


def test_blocks_of_an_unknown_request_of_another_server_are_soon_missing(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_server, "UNKNOWN_S", 0.1)
    source, target = sides
    source.offer(range(2))
    target.fetch(DirectSource("r", 0), range(4))
    assert target.missing()[-2:] == [2, 3]


@pytest.mark.slow
def test_a_source_that_dies_ends_the_fetch(sides: tuple[Side, Side]) -> None:
    source, target = sides
    source.offer(range(3))
    target.fetch(DirectSource("r", 0), range(6))
    wait_until(lambda: set(target.pages[0][NUM_BLOCKS - 3].tolist()) == {2})
    source.connector.close()
    assert target.missing()[-3:] == [3, 4, 5]
    # Nobody listens there now.
    target.fetch(DirectSource("r", 0), range(6))
    assert target.missing() == list(range(6))


def test_no_fetched_block_is_written_after_a_reset(sides: tuple[Side, Side]) -> None:
    source, target = sides
    target.fetch(DirectSource("r", 0), range(3))
    target.connector.reset()
    source.offer(range(3))
    source.command(DirectCommands(ended=["other"]))
    target.fetch(DirectSource("r", 0), range(1), 7)
    assert target.missing() == []
    assert set(target.pages[0][NUM_BLOCKS - 2].tolist()) == {2}


def test_blocks_of_another_fingerprint_are_not_sent(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    source, target = Side(config, 0, 1), Side(config, 1, 2, fingerprint=b"g" * 32)
    source.offer(range(3))
    target.fetch(DirectSource("r", 0), range(3))
    assert target.missing() == [0, 1, 2]
    source.connector.close()
    target.connector.close()


@pytest.mark.slow
def test_other_engines_need_the_cluster_key(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    transfer = KVTransferConfig("direct", kv_port=port)
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
        ClusterKey.generate().save(str(tmp_path / f"{name}.key"))
    right, wrong = (str(tmp_path / f"{name}.key") for name in ("right", "wrong"))
    with pytest.raises(ConfigError, match="needs --cluster-key"):
        Side(config_in(tmp_path / "right"), 0, 1, transfer)
    source = Side(config_in(tmp_path / "right", right), 0, 1, transfer)
    source.offer(range(3))
    for key, is_admitted in ((right, True), (wrong, False), (None, False)):
        target = Side(config_in(tmp_path / "wrong", key), 0, 2)
        target.fetch(DirectSource("r", host="127.0.0.1", port=port), range(3))
        assert target.missing() == ([] if is_admitted else [0, 1, 2])
        target.connector.close()
    source.connector.close()


def _offer_with_nixl(path: str, has_offered: Event) -> None:
    """Run a worker that offers 64 blocks, until it is killed."""
    transfer = KVTransferConfig("direct", kv_connector_extra_config={"transport": "nixl"})
    Side(config_in(Path(path)), 0, 1, transfer).offer(range(64))
    has_offered.set()
    signal.pause()


@pytest.fixture
def nixl_source(tmp_path: Path) -> Iterator[SpawnProcess]:
    pytest.importorskip("nixl")
    spawn = multiprocessing.get_context("spawn")
    has_offered = spawn.Event()
    source = spawn.Process(target=_offer_with_nixl, args=(str(tmp_path), has_offered), daemon=True)
    source.start()
    assert has_offered.wait(60)
    yield source
    source.kill()
    source.join()


def test_nixl_moves_blocks_between_processes_until_one_dies(
    tmp_path: Path, nixl_source: SpawnProcess
) -> None:
    transfer = KVTransferConfig("direct", kv_connector_extra_config={"transport": "nixl"})
    target = Side(config_in(tmp_path), 1, 2, transfer)
    source = DirectSource("r", 0)
    for _ in range(3):
        target.fetch(source, range(64))
        assert target.missing() == []
    target.check(range(32))
    staging = target.connector.staging
    assert staging is not None
    assert staging.num_bytes_read == 3 * 64 * NUM_PAGES * PAGE_BYTES
    nixl_source.kill()
    nixl_source.join()
    target.fetch(source, range(64))
    assert target.missing() == list(range(64))
    target.connector.close()


def test_a_worker_without_nixl_fetches_from_one_with_it_through_sockets(
    tmp_path: Path, nixl_source: SpawnProcess
) -> None:
    target = Side(config_in(tmp_path), 1, 2)
    target.fetch(DirectSource("r", 0), range(64))
    assert target.missing() == []
    target.connector.close()
