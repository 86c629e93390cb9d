"""The worker side of a KV connector, which moves the bytes of KV-cache blocks.

The scheduler side (`core/kv_cache/connector.py`) decides what is moved. Its metadata arrives with each step. Reports
are sent back at any time, as `KVConnectorReport`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from ...protocol.config import EngineConfig, KVTransferConfig
from ...protocol.errors import ConfigError
from ...protocol.worker_messages import CheckedLoad, KVConnectorOutput

if TYPE_CHECKING:
    # Imported only for types, because a worker without a model does not use torch, which takes a second to import.
    from .block_memory import BlockMemory
    from .block_regions import BlockRegions


class ConnectorContext(msgspec.Struct, frozen=True):
    """The worker that a connector belongs to.

    Attributes:
        config: The configuration of the engine.
        transfer: The configuration of the connector.
        core_index: The replica of the worker.
        rank: The worker's rank within its replica.
        memory: The KV cache of the worker. All workers of a replica have the same blocks, each with its own part of
            them.
        fingerprint: A hash of everything besides its content key that determines the bytes of a block: weights, layout
            and numerics. Blocks may be exchanged only between workers with equal fingerprints.
        regions: The parts of a block that servers with other numbers of tensor-parallel ranks divide in another way.
    """

    config: EngineConfig
    transfer: KVTransferConfig
    core_index: int
    rank: int
    memory: BlockMemory
    fingerprint: bytes
    regions: BlockRegions | None = None


class KVConnector(ABC):
    """The worker side of a KV connector.

    The worker's main thread calls all methods. None of them may take longer than copying the blocks that it names,
    because the next step waits for it. Transfers belong in separate threads.

    Attributes:
        epoch: The epoch of the core, which the worker sets before it calls `reset`.
    """

    epoch: int = 0

    @property
    @abstractmethod
    def fd(self) -> int:
        """A file descriptor that is readable while `take_reports` has something to return."""

    @abstractmethod
    def begin_step(self, metadata: bytes) -> None:
        """Apply the metadata that the scheduler side attached to a step, possibly b"", before the step is computed.

        All earlier steps have been computed, or are queued on the GPU's current stream. Blocks that the scheduler has
        freed still have their content. The step may overwrite it once this method returns.
        """

    def start_loads(self) -> None:  # noqa: B027
        """Start the asynchronous loads of the metadata that `begin_step` has received. Called after it.

        If several connectors are combined, the loads of one may overwrite blocks that others copy in `begin_step`.
        """

    def check_loads(self, loads: Sequence[CheckedLoad]) -> None:  # noqa: B027
        """Check that these loads write only finite numbers. Called after `start_loads`, possibly with no loads.

        `CheckedConnector` does this for all connectors.
        """

    def end_step(self) -> KVConnectorOutput | None:
        """Return a report about the step that was just computed: the blocks that could not be loaded for it.

        Only the report of the worker that sends the step's output reaches the scheduler.
        """
        return None

    @abstractmethod
    def take_reports(self) -> list[KVConnectorOutput]:
        """Return the reports since the last call, which are sent to the core immediately."""

    @abstractmethod
    def reset(self) -> None:
        """Discard all transfers, because another core takes over, which started none of them.

        When this method returns, no transfer writes to a block anymore. It may wait for running transfers.
        """

    @abstractmethod
    def close(self) -> None:
        """Complete what can be completed within a few seconds, and release resources."""


ConnectorFactory: TypeAlias = Callable[[ConnectorContext], KVConnector]

_FACTORIES: Final[dict[str, ConnectorFactory]] = {}

_BUILT_IN: Final = {
    "LMCacheConnector": ".lmcache.lmcache_connector",
    "MultiConnector": ".multi_connector",
    "direct": ".direct_connector",
    "disk": ".disk.disk_connector",
}
"""For each connector name, the module that registers the connector when it is imported."""


def register_connector(name: str, factory: ConnectorFactory) -> None:
    """Register the worker side of a connector under the name of its scheduler side.

    Raises:
        ValueError: The name is taken.
    """
    if name in _FACTORIES:
        raise ValueError(f"KV connector {name!r} is already registered")
    _FACTORIES[name] = factory


def create_connector(context: ConnectorContext) -> KVConnector:
    """Create the configured connector.

    If the configuration names a module, the class there whose name is the connector's name followed by `Worker` is
    used.

    Raises:
        ConfigError: No connector has that name, or it is not a `KVConnector`.
    """
    name, path = context.transfer.kv_connector, context.transfer.kv_connector_module_path
    if path is None:
        if name in _BUILT_IN:
            import_module(_BUILT_IN[name], __package__)
        factory = _FACTORIES.get(name)
        if factory is None:
            known = ", ".join(sorted({*_FACTORIES, *_BUILT_IN}))
            raise ConfigError(f"kv_connector={name!r} has no worker side; registered: {known}")
        return factory(context)
    try:
        connector_class = getattr(import_module(path), f"{name}Worker")
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"kv_connector={name!r}: {path!r} has no {name}Worker: {error}"
        ) from error
    if not (isinstance(connector_class, type) and issubclass(connector_class, KVConnector)):
        raise ConfigError(
            f"kv_connector={name!r}: {name}Worker in {path!r} is not a subclass of KVConnector"
        )
    connector: KVConnector = connector_class(context)  # type: ignore[call-arg]
    return connector
