"""The configuration and messages of the KV connector that consists of others."""

from __future__ import annotations

from typing import Final

import msgspec

from ..config import KVTransferConfig

MULTI_CONNECTOR: Final = "MultiConnector"
"""The name of the connector, as in vLLM."""


class MultiCommands(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The metadata of a step: that of each connector, and the transfers that end with more than one of them.

    `loads` are pairs of transfer id and number of connectors that load blocks for it.
    """

    metadata: list[bytes]
    loads: list[tuple[int, int]] = []


class MultiReport(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The data of a report, and the number of the connector that it comes from."""

    connector: int
    data: bytes


def child_configs(config: KVTransferConfig) -> list[KVTransferConfig]:
    """Return the configurations of the connectors, in the order in which they are searched.

    Raises:
        msgspec.ValidationError: `connectors` is no list of configurations.
    """
    connectors = config.kv_connector_extra_config.get("connectors", [])
    return msgspec.convert(connectors, list[KVTransferConfig])


def find_connector(config: KVTransferConfig | None, name: str) -> KVTransferConfig | None:
    """Return the configuration of the connector of this name; None if there is none."""
    if config is None:
        return None
    children = child_configs(config) if config.kv_connector == MULTI_CONNECTOR else [config]
    return next((child for child in children if child.kv_connector == name), None)
