"""Build the configuration of the KV connectors from `--kv-transfer-config`, `--kv-disk` and `--replica-roles`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from ...protocol.config import CacheConfig, Device, KVTransferConfig, ParallelConfig, ReplicaRole
from ...protocol.errors import ConfigError
from ...protocol.kv_transfer.direct import DIRECT_CONNECTOR, PullSettings
from ...protocol.kv_transfer.multi import MULTI_CONNECTOR, child_configs
from ...protocol.kv_transfer.store import DISK_CONNECTOR

HELD_S: Final = 60.0
"""Seconds for which a prefill replica keeps the blocks of a request that no other replica fetches."""


def make_kv_transfer(
    given: KVTransferConfig | None, cache: CacheConfig, parallel: ParallelConfig, device: Device
) -> tuple[KVTransferConfig | None, CacheConfig]:
    """Return the configuration of the KV connectors (None without any) and that of the cache.

    `given` is the value of `--kv-transfer-config`. `--kv-disk` and `--replica-roles` add one connector each. If a disk
    connector names a directory, the returned cache configuration has it.

    Raises:
        ConfigError: The settings contradict each other.
    """
    children = list(_flatten(given)) if given is not None else []
    if given is not None and not children:
        raise ConfigError("--kv-transfer-config has no connectors; add one, or remove the flag")
    cache = _with_disk(children, cache)
    names = [child.kv_connector for child in children]
    if parallel.replica_roles:
        _check_roles(parallel, names)
        if DIRECT_CONNECTOR not in names:
            children.insert(0, KVTransferConfig(DIRECT_CONNECTOR, transfer_timeout_s=HELD_S))
    if cache.disk_path is not None and DISK_CONNECTOR not in names:
        children.append(KVTransferConfig(DISK_CONNECTOR))
    if not children:
        return None, cache
    _check_support(children, cache, device)
    children = [_with_workers(child, parallel) for child in children]
    if len(children) == 1:
        return children[0], cache
    first = given or children[0]
    combined = msgspec.structs.replace(
        first,
        kv_connector=MULTI_CONNECTOR,
        kv_connector_module_path=None,
        kv_connector_extra_config={"connectors": msgspec.to_builtins(children)},
    )
    return combined, cache


def _flatten(config: KVTransferConfig) -> Iterator[KVTransferConfig]:
    """Yield the connectors of a configuration, in the order in which they are searched for blocks."""
    if config.kv_connector == MULTI_CONNECTOR and config.kv_connector_module_path is None:
        try:
            children = child_configs(config)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--kv-transfer-config: connectors: {error}") from None
        for child in children:
            yield from _flatten(child)
    else:
        yield config


def _with_disk(children: list[KVTransferConfig], cache: CacheConfig) -> CacheConfig:
    """Return the cache's configuration with the directory that the disk connector's settings name."""
    for child in children:
        if child.kv_connector != DISK_CONNECTOR:
            continue
        extra = child.kv_connector_extra_config
        path = extra.get("path", extra.get("shared_storage_path", cache.disk_path))
        gib = extra.get("gib", cache.disk_gib)
        if not isinstance(path, str) or not path:
            raise ConfigError(
                f'--kv-transfer-config: the connector {DISK_CONNECTOR!r} needs kv_connector_extra_config {{"path": '
                '"DIRECTORY"}, or --kv-disk'
            )
        if not isinstance(gib, int | float) or gib <= 0:
            raise ConfigError(f"--kv-transfer-config: gib must be a positive number, got {gib!r}")
        cache = msgspec.structs.replace(
            cache, disk_path=os.path.abspath(os.path.expanduser(path)), disk_gib=float(gib)
        )
    return cache


def _with_workers(config: KVTransferConfig, parallel: ParallelConfig) -> KVTransferConfig:
    """Return a connector's configuration, completed with the fields that describe this engine."""
    extra = {
        **config.kv_connector_extra_config,
        "num_workers": parallel.workers_per_core,
        "tp_size": parallel.tensor_parallel_size,
    }
    engine_id = config.engine_id or f"{socket.gethostname()}-{os.getpid()}"
    return msgspec.structs.replace(config, kv_connector_extra_config=extra, engine_id=engine_id)


def _check_roles(parallel: ParallelConfig, names: list[str]) -> None:
    roles = ",".join(parallel.replica_roles)
    if not {ReplicaRole.PREFILL, ReplicaRole.DECODE} <= set(parallel.replica_roles):
        raise ConfigError(
            f"--replica-roles {roles} needs at least one prefill and one decode replica"
        )
    if parallel.is_distributed:
        raise ConfigError(
            "--replica-roles needs all replicas on one machine; across machines use --kv-transfer-config "
            "with a kv_port on each engine, and a proxy that sends kv_transfer_params"
        )
    if names and DIRECT_CONNECTOR not in names:
        raise ConfigError(
            f"--replica-roles {roles} needs the connector {DIRECT_CONNECTOR!r}, but --kv-transfer-config "
            f"has only {', '.join(names)}; add it, or remove one of the two flags"
        )


def _check_pull(config: KVTransferConfig) -> None:
    try:
        pull = msgspec.convert(config.kv_connector_extra_config, PullSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--kv-transfer-config: kv_connector_extra_config: {error}") from None
    if pull.bidirectional_kv_xfer and not config.kv_port:
        raise ConfigError(
            "--kv-transfer-config: bidirectional_kv_xfer needs a kv_port, where servers that prefill fetch blocks"
        )


def _check_support(children: list[KVTransferConfig], cache: CacheConfig, device: Device) -> None:
    names: dict[str, Any] = dict.fromkeys(child.kv_connector for child in children)
    if len(names) < len(children):
        raise ConfigError(
            "--kv-transfer-config names a connector twice: "
            f"{', '.join(child.kv_connector for child in children)}; remove one of them"
        )
    for child in children:
        if child.kv_connector == DIRECT_CONNECTOR:
            _check_pull(child)
    flag = (
        f"--kv-disk {cache.disk_path}"
        if list(names) == [DISK_CONNECTOR]
        else f"the KV connector {', '.join(names)}"
    )
    if not cache.enable_prefix_caching:
        raise ConfigError(
            f"{flag} needs prefix caching, which is disabled or not supported for this model; remove the flag"
        )
    if device is Device.NULL:
        raise ConfigError(
            f"{flag} needs a KV cache, and --device null has none; remove one of the two flags"
        )
