"""The configuration and messages of `MultiConnector`, a KV connector that combines several others."""

from __future__ import annotations

from typing import Final

import msgspec

from ..config import KVTransferConfig
from ..messages import I32

MULTI_CONNECTOR: Final = "MultiConnector"
"""The name of the connector in `--kv-transfer-config`, the same as in vLLM."""


class MultiCommands(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The metadata of a step: one entry per connector, and the transfers in which several connectors take part.

    `loads` are pairs of transfer id and the number of connectors that load blocks for it. It ends when all have.
    `lost_blocks` int32 are blocks of these loads that no connector loads, because the one that found them failed.
    """

    metadata: list[bytes]
    loads: list[tuple[int, int]] = []
    lost_blocks: I32 = b""


class MultiReport(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The data of a report, with the index of the connector that it comes from."""

    connector: int
    data: bytes


def child_configs(config: KVTransferConfig) -> list[KVTransferConfig]:
    """Return the configurations of the combined connectors, in the order in which they are searched.

    Raises:
        msgspec.ValidationError: `connectors` is not a list of configurations.
    """
    connectors = config.kv_connector_extra_config.get("connectors", [])
    return msgspec.convert(connectors, list[KVTransferConfig])


def needs_checks(config: KVTransferConfig) -> bool:
    """Return whether workers check the numbers in loaded blocks: if a connector comes from a module.

    The connectors of Engine verify checksums, which is enough, because stored numbers are finite.
    """
    children = child_configs(config) if config.kv_connector == MULTI_CONNECTOR else [config]
    return any(child.kv_connector_module_path is not None for child in children)


def with_ports_of_core(config: KVTransferConfig, core_index: int) -> KVTransferConfig:
    """Return the configuration in which each port is that of the first worker of a core, instead of core 0."""
    extra = config.kv_connector_extra_config
    if config.kv_connector == MULTI_CONNECTOR:
        children = [with_ports_of_core(child, core_index) for child in child_configs(config)]
        extra = {**extra, "connectors": msgspec.to_builtins(children)}
        return msgspec.structs.replace(config, kv_connector_extra_config=extra)
    num_workers = extra.get("num_workers")
    if not config.kv_port or not isinstance(num_workers, int):
        return config
    return msgspec.structs.replace(config, kv_port=config.kv_port + core_index * num_workers)


def find_connector(config: KVTransferConfig | None, name: str) -> KVTransferConfig | None:
    """Return the configuration of the connector with this name, or None."""
    if config is None:
        return None
    children = child_configs(config) if config.kv_connector == MULTI_CONNECTOR else [config]
    return next((child for child in children if child.kv_connector == name), None)
