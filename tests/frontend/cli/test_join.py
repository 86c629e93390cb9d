"""Test which machines may join, and the errors for invalid cluster settings."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from engine.frontend.cli.arguments import parse_settings
from engine.frontend.cli.engine_config import make_parallel_config
from engine.frontend.cli.main import main
from engine.protocol.cluster_key import load_cluster_key
from engine.protocol.config import ParallelConfig
from engine.protocol.errors import ConfigError

TORCHRUN = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "cluster.key"
    assert main(["keygen", "--out", str(path)]) == 0
    return str(path)


def test_keygen_writes_a_private_key_and_never_overwrites(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stat.S_IMODE(Path(key).stat().st_mode) == 0o600
    load_cluster_key(key)
    assert main(["keygen", "--out", key]) == 1
    assert f"{key} exists" in capsys.readouterr().err
    assert main(["keygen", "--out", "-"]) == 0
    other = Path(key).with_name("other")
    other.touch(mode=0o600)
    other.write_text(capsys.readouterr().out)
    assert load_cluster_key(str(other)) != load_cluster_key(key)


@pytest.mark.parametrize("missing", list(TORCHRUN))
def test_worker_requires_torchrun_variables(
    key: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    missing: str,
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    assert main(["worker", "--core", "127.0.0.1:1", "--key", key]) == 1
    assert f"${missing}" in capsys.readouterr().err


def test_worker_requires_host_and_port_of_its_core(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["worker", "--core", "somewhere", "--key", key]) == 1
    assert "'somewhere' must be HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--headless"], "--nnodes N"),
        (["--headless", "-n", "2"], "--node-rank 0 --headless must be between 1 and 1"),
        (["--headless", "-n", "2", "-r", "2"], "--node-rank 2 --headless must be between 1 and 1"),
        (["-n", "2", "-r", "1"], "--node-rank 1 needs --headless"),
    ],
)
def test_invalid_node_rank_is_rejected(
    key: str, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["serve", "--cluster-key", key, *flags]) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_several_machines_require_a_key_and_free_ports(key: str) -> None:
    with pytest.raises(ConfigError, match="engine keygen"):
        make_parallel_config(parse_settings(["-n", "2"], {}))
    last = ["-n", "2", "--cluster-key", key, "--master-port", "65534"]
    with pytest.raises(ConfigError, match="--master-port 65534 must be at most 65533"):
        make_parallel_config(parse_settings(last, {}))
    both = ["-n", "2", "--cluster-key", key, "--distributed-executor-backend", "external_launcher"]
    with pytest.raises(ConfigError, match="--nnodes 2 must not be given"):
        make_parallel_config(parse_settings(both, {}))


def test_workers_of_a_node_have_consecutive_ranks() -> None:
    parallel = ParallelConfig(
        tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2, nnodes=4
    )
    assert [parallel.node_of(worker) for worker in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert parallel.spans_nodes(0)
    alone = ParallelConfig(tensor_parallel_size=2, data_parallel_size=2, nnodes=2)
    assert not alone.spans_nodes(0) and not alone.spans_nodes(1)
