"""The workers' half of a KV connector, which moves the bytes of KV-cache blocks.

The scheduler's half (`core/kv_cache/connector.py`) decides what is moved. Its metadata arrives with each step, and
reports go back at any time, by `KVConnectorReport`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final, TypeAlias

from ...protocol.config import EngineConfig, KVTransferConfig
from ...protocol.errors import ConfigError
from ...protocol.worker_messages import KVConnectorOutput

if TYPE_CHECKING:
    # A worker without a model uses no torch, which takes a second to import.
    from .block_memory import BlockMemory


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """The worker in which a connector works.

    Attributes:
        config: The configuration of the engine.
        transfer: The configuration of the connector.
        core_index: The replica of the worker.
        rank: The worker within its replica.
        memory: The KV cache of the worker. Every worker of a replica has the same blocks, with its own part of each.
        fingerprint: A hash of all that determines the bytes of a block beside its content key: weights, layout and
            numerics. Blocks may be exchanged only between equal fingerprints.
    """

    config: EngineConfig
    transfer: KVTransferConfig
    core_index: int
    rank: int
    memory: BlockMemory
    fingerprint: bytes


class KVConnector(ABC):
    """The workers' half of a KV connector.

    All methods are called by the worker's main thread. None may wait for anything that takes longer than a copy of the
    blocks it names, because the next step waits for it; transfers belong into threads.
    """

    @property
    @abstractmethod
    def fd(self) -> int:
        """A file descriptor that is readable while `take_reports` has something to return."""

    @abstractmethod
    def begin_step(self, metadata: bytes) -> None:
        """Apply what the scheduler's half attached to a step, which may be b"", before anything of it is computed.

        All earlier steps have been computed, or on a GPU queued on the current stream. Blocks that the scheduler has
        freed still have their content, which the step may overwrite once this method returns.
        """

    def end_step(self) -> KVConnectorOutput | None:
        """Return what belongs to the step that was just computed: blocks that could not be loaded for it.

        Only the report of the worker that answers the core reaches the scheduler.
        """
        return None

    @abstractmethod
    def take_reports(self) -> list[KVConnectorOutput]:
        """Return the reports since the last call, which are sent to the core at once."""

    @abstractmethod
    def reset(self) -> None:
        """Drop all transfers, because another core follows, which started none of them.

        When this returns, no block is written to any more. Waiting for running transfers is allowed here.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish what can be finished within a few seconds, and release resources."""


ConnectorFactory: TypeAlias = Callable[[ConnectorContext], KVConnector]

_FACTORIES: Final[dict[str, ConnectorFactory]] = {}

_BUILT_IN: Final = {
    "MultiConnector": ".multi_connector",
    "direct": ".direct_connector",
    "disk": ".disk.disk_connector",
}
"""The modules that register the connectors of these names when they are imported."""


def register_connector(name: str, factory: ConnectorFactory) -> None:
    """Register the workers' half of a connector under the name of its scheduler's half.

    Raises:
        ValueError: The name is taken.
    """
    if name in _FACTORIES:
        raise ValueError(f"KV connector {name!r} is already registered")
    _FACTORIES[name] = factory


def create_connector(context: ConnectorContext) -> KVConnector:
    """Create the configured connector.

    A connector of a module of its own has its workers' half there as well, under its name followed by `Worker`.

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
            raise ConfigError(f"kv_connector={name!r} has no workers' half; registered: {known}")
        return factory(context)
    try:
        connector_class = getattr(import_module(path), f"{name}Worker")
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"kv_connector={name!r}: {path!r} has no {name}Worker: {error}"
        ) from error
    if not (isinstance(connector_class, type) and issubclass(connector_class, KVConnector)):
        raise ConfigError(f"kv_connector={name!r}: {name}Worker in {path!r} is not a KVConnector")
    connector: KVConnector = connector_class(context)  # type: ignore[call-arg]
    return connector
