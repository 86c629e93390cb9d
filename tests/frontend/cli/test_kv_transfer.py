"""The configuration of KV connectors, from flags and from requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest
from engine.frontend.api.inputs.transfer_params import transfer_params
from engine.frontend.cli.kv_transfer import make_kv_transfer
from engine.frontend.cli.option_values import PARSERS
from engine.frontend.http.errors import APIError
from engine.protocol.config import (
    CacheConfig,
    Device,
    EngineConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
)
from engine.protocol.errors import ConfigError
from engine.protocol.kv_transfer.multi import child_configs, find_connector, with_ports_of_core

NO_DISK = CacheConfig()
CONFIG = EngineConfig("/run", 1, ModelConfig("m", "p", "t", ("m",), "llama", 9, 9, (2,)))


def make(
    fields: dict[str, Any] | None,
    cache: CacheConfig = NO_DISK,
    roles: str = "",
    device: Device = Device.CPU,
) -> tuple[KVTransferConfig | None, CacheConfig]:
    given = PARSERS["kv_transfer"](json.dumps(fields)) if fields is not None else None
    of_each = PARSERS["replica_roles"](roles) if roles else ()
    parallel = ParallelConfig(data_parallel_size=max(len(of_each), 1), replica_roles=of_each)
    return make_kv_transfer(given, cache, parallel, device)


def multi(*connectors: dict[str, Any]) -> dict[str, Any]:
    extra = {"connectors": list(connectors)}
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}


def pulling(**extra: int) -> dict[str, Any]:
    extra = {"bidirectional_kv_xfer": True, **extra}
    return {"kv_connector": "direct", "kv_connector_extra_config": extra}


def names(config: KVTransferConfig | None) -> list[str]:
    assert config is not None
    return [child.kv_connector for child in child_configs(config)] or [config.kv_connector]


def test_flags_and_vllms_names_choose_connectors() -> None:
    assert make(None)[0] is None
    config, _ = make({"kv_connector": "direct", "kv_buffer_device": "cpu"})
    assert names(config) == ["direct"]
    storage = {"shared_storage_path": "/store", "gib": 3}
    shared = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": storage}
    config, cache = make(multi({"kv_connector": "direct"}, shared))
    assert names(config) == ["direct", "disk"]
    assert (cache.disk_path, cache.disk_gib) == ("/store", 3.0)
    disk = CacheConfig(disk_path="/disk")
    assert names(make(None, disk)[0]) == ["disk"]
    assert names(make(None, disk, "prefill=1,decode=2")[0]) == ["direct", "disk"]


def test_settings_of_the_given_connector_apply_if_others_are_added() -> None:
    limits = {"load_timeout_s": 5.0, "transfer_timeout_s": 7.0, "kv_load_failure_policy": "fail"}
    disk = CacheConfig(disk_path="/disk")
    config, _ = make({"kv_connector": "direct", **limits}, disk, "prefill=1,decode=2")
    assert names(config) == ["direct", "disk"]
    assert config is not None
    assert {name: getattr(config, name) for name in limits} == limits


def test_vllms_nixl_connector_is_direct_with_another_transport(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("nixl")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
    config, _ = make({"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"})
    assert names(config) == ["direct"]
    assert config is not None
    assert config.kv_port == 5600
    assert config.kv_connector_extra_config["transport"] == "nixl"


@pytest.mark.skipif(find_spec("lmcache") is not None, reason="LMCache is installed")
def test_the_connector_to_lmcache_names_the_extra_that_it_needs() -> None:
    for config in (
        {"kv_connector": "LMCacheConnector"},
        multi({"kv_connector": "LMCacheConnectorV1"}),
    ):
        with pytest.raises(ValueError, match=r"install the extra engine-serve\[lmcache\]"):
            make(config)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (lambda: make({"kv_connector": "disk"}), "needs kv_connector_extra_config"),
        (lambda: make(multi()), "has no connectors"),
        (lambda: make(multi({"a": 1})), "missing required field"),
        (lambda: make(multi({"kv_connector": "direct"}, {"kv_connector": "direct"})), "twice"),
        (lambda: make({"kv_connector": "direct", "kv_role": "x"}), "kv_role"),
        (lambda: make({"kv_connector": "P2pNcclConnector"}), "use 'direct' with a kv_port"),
        (lambda: make({"kv_connector": "LMCacheMPConnector"}), "use 'LMCacheConnector'"),
        (lambda: make({}), "needs a field"),
        (lambda: make(None, roles="decode=2"), "at least one prefill"),
        (lambda: make(None, roles="chef=2"), "no role 'chef'"),
        (lambda: make({"kv_connector": "direct"}, device=Device.NULL), "--device null"),
        (lambda: make(pulling()), "bidirectional_kv_xfer needs a kv_port"),
        (lambda: make(pulling(kv_recompute_threshold=-1)), r">= 0 .*kv_recompute_threshold"),
        (
            lambda: make({"kv_connector": "direct"}, CacheConfig(enable_prefix_caching=False)),
            "needs prefix caching",
        ),
    ],
)
def test_contradictory_kv_transfer_options_are_rejected(
    problem: Callable[[], object], message: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        problem()


def test_each_core_names_the_ports_of_its_own_workers() -> None:
    direct = {"kv_connector": "direct", "kv_port": 5600}
    for fields in (
        direct,
        multi(direct, {"kv_connector": "disk", "kv_connector_extra_config": {"path": "/a"}}),
    ):
        given, _ = make_kv_transfer(
            PARSERS["kv_transfer"](json.dumps(fields)),
            NO_DISK,
            ParallelConfig(tensor_parallel_size=2),
            Device.CPU,
        )
        assert given is not None
        for core, port in ((0, 5600), (1, 5602), (2, 5604)):
            config = find_connector(with_ports_of_core(given, core), "direct")
            assert config is not None and config.kv_port == port


def test_kv_transfer_params_accept_only_fields_that_proxies_send() -> None:
    config = msgspec.structs.replace(CONFIG, kv_transfer=KVTransferConfig("direct"))
    sent = {"do_remote_decode": True, "remote_host": None, "remote_block_ids": None, "replica": 0}
    assert transfer_params(sent, config) == {"do_remote_decode": True}
    fetched = {"do_remote_prefill": True, "remote_request_id": "a", "remote_port": "12"}
    assert transfer_params(fetched | {"remote_block_ids": [1]}, config) == fetched
    for value in (
        {"do_remote_prefill": 1},
        {"do_remote_prefill": True, "do_remote_decode": True},
        {"remote_host": "x" * 300},
        {"do_remote_decode": True, "remote_num_tokens": -1},
        {"do_remote_decode": True, "remote_num_tokens": 2**64},
        {"do_remote_prefill": True, "remote_port": 2**16},
    ):
        with pytest.raises(APIError):
            transfer_params(value, config)
    assert transfer_params(sent, CONFIG) is None
