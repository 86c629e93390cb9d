"""The scheduler side of a KV connector, which moves KV-cache blocks from or to another store or replica.

The worker side (`workers/kv_transfer/connector.py`) moves the bytes. The two sides communicate by
`SchedulerOutput.kv_connector_metadata` and `KVConnectorOutput`, which identify a transfer by its request's
`transfer_id`. A `KVConnectorOutput` arrives with a step's output, or on its own at any time.

There are two kinds of connector. A plain `KVConnector` reports how many tokens of a request it can load, and supports
models with one group of full attention. A `BlockConnector` finds single blocks by their content keys, and supports all
models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Final, NamedTuple, TypeAlias

from ...protocol.config import KVTransferConfig
from ...protocol.errors import ConfigError
from ...protocol.kv_events import KVCacheEvent
from ...protocol.messages import EngineCoreRequest, FinishReason
from ...protocol.worker_messages import SchedulerOutput
from ..state.request import Request


class ExternalMatch(NamedTuple):
    """The number of tokens that a connector can load beyond those already computed.

    A synchronous load runs in the step that admits the request. Until that step starts, earlier steps may still use the
    blocks. An asynchronous load may start as soon as the workers receive the metadata, because no step in flight uses
    its blocks. It may take any time, and may include the last token.
    """

    num_tokens: int
    is_async: bool = False


class RequestEnd(NamedTuple):
    """A connector's answer to the end of a request.

    If `delays_free`, the blocks are kept until the transfer is reported as sent. `params` are sent to the client.
    """

    delays_free: bool = False
    params: dict[str, object] | None = None


class KVConnector(ABC):
    """The scheduler side of a KV connector, called between steps.

    An exception fails the request concerned. Methods that concern no single request must not raise:
    `build_connector_meta`, `needs_step`, `receive`, `request_refused`, `transfer_expired`, `take_events` and
    `take_stats`.

    If `polls_workers`, the workers get empty steps while a transfer is in progress and nothing is computed, so that
    they can report its end in their outputs. Otherwise they send such reports on their own, without a step.
    """

    polls_workers: bool = True

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> ExternalMatch | None:
        """Return how many tokens can be loaded after the first `num_computed_tokens` tokens.

        None defers the answer: the request waits, and the method is called again later.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Receive the blocks into which the last `num_external_tokens` matched tokens will be loaded.

        `block_ids` are all blocks of the request. For an asynchronous load, this method is called once no step in
        flight uses the blocks. That may be some steps after the match, or never if the request finishes first. The
        metadata of the next step starts the load in the workers.
        """

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> bytes:
        """Return the metadata for the workers. Called once per step."""

    def needs_step(self) -> bool:
        """Return whether the workers must get metadata even if there is nothing to compute."""
        return False

    def is_ready(self) -> bool:
        """Return whether the workers have reported what they store, so that the first request may be served."""
        return True

    def is_flushed(self) -> bool:
        """Return whether everything to be stored has been stored, so that the workers may exit."""
        return True

    def receive(self, rank: int, data: bytes) -> None:  # noqa: B027
        """Receive the `data` of a report from worker `rank`."""

    def request_finished(
        self, request: Request, block_ids: Sequence[int], reason: FinishReason
    ) -> RequestEnd:
        """Handle the end of a request that holds these blocks. If it holds none, freeing cannot be delayed.

        The blocks of a running request hold its first `request.num_held_tokens` tokens.
        """
        return RequestEnd()

    def request_refused(self, message: EngineCoreRequest) -> None:  # noqa: B027
        """Handle a request that the scheduler refused, for example because its queue is full."""

    def transfer_expired(self, transfer_id: int) -> None:  # noqa: B027
        """Handle the timeout of a transfer whose blocks were kept.

        Once the next step has run, the blocks may be overwritten.
        """

    def take_events(self) -> list[KVCacheEvent]:
        """Return the KV-cache events of the connector's own store since the last call."""
        return []

    def take_stats(self) -> dict[str, float]:
        """Return counts since the last call, for the statistics of the step."""
        return {}

    def shutdown(self) -> None:  # noqa: B027
        """Release resources. The connector is not called afterwards."""


class BlockConnector(KVConnector):
    """A connector to a store of single blocks, which it finds by content keys (`cached_prefix.group_key`).

    It supports every kind of KV-cache group. Loads are asynchronous. It is notified of each change of the prefix cache
    and decides which of the blocks to store.
    """

    polls_workers = False

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> ExternalMatch | None:
        """Return no tokens, because `find_blocks` is used instead."""
        return ExternalMatch(0)

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Do nothing, because `load_blocks` is called instead."""

    @abstractmethod
    def find_blocks(self, request: Request, keys: Sequence[bytes]) -> bytes | None:
        """Return a byte for each key: 1 if the block can be loaded, else 0. Return b"" if none can.

        None defers the answer: the request waits, and the method is called again later.
        """

    def last_block_key(self, request: Request) -> bytes:
        """Return the key of the block with the last tokens of a request, even if it is not full.

        If the connector can load it, only one token is left to compute. b"" if it finds only full blocks.
        """
        return b""

    @abstractmethod
    def load_blocks(
        self, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> None:
        """Load blocks into `block_ids`, which no step in flight uses. The next step's metadata starts the load."""

    def observe_pool(self, find_block: Callable[[bytes], int | None], block_size: int) -> None:
        """Receive a function that returns the block with a given content key, or None, and the tokens in a block.

        The scheduler calls this before any other method.
        """

    def blocks_cached(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Handle blocks that became findable. They may be copies of content that was cached before.

        The steps scheduled so far, or the next one, fill them.
        """

    def block_evicted(self, key: bytes, block_id: int) -> None:
        """Handle the eviction of a block.

        The next step may overwrite it, but only after the workers applied its metadata.
        """

    def copy_dropped(self, key: bytes, block_id: int) -> None:
        """Handle that one of several blocks with the same content may be overwritten by the next step."""

    def blocks_removed(self, keys: Iterable[bytes]) -> None:
        """Handle content that became unfindable because it may be wrong, or is no longer needed."""

    def cache_cleared(self) -> None:
        """Handle the removal of all content."""


ConnectorFactory: TypeAlias = Callable[[KVTransferConfig], KVConnector]

_FACTORIES: Final[dict[str, ConnectorFactory]] = {}

_BUILT_IN: Final = {
    "LMCacheConnector": ".connectors.lmcache_tier",
    "MultiConnector": ".connectors.multi_connector",
    "direct": ".connectors.direct_transfer",
    "disk": ".connectors.disk_tier",
}
"""For each connector name, the module that registers the connector when it is imported."""


def register_connector(name: str, factory: ConnectorFactory) -> None:
    """Register a connector under a name. Raise ValueError if the name is taken."""
    if name in _FACTORIES:
        raise ValueError(f"KV connector {name!r} is already registered")
    _FACTORIES[name] = factory


def create_connector(config: KVTransferConfig) -> KVConnector:
    """Create the configured connector.

    Raises:
        ConfigError: No connector has that name, or it is not a `KVConnector`.
    """
    name, path = config.kv_connector, config.kv_connector_module_path
    if path is None:
        if name in _BUILT_IN:
            import_module(_BUILT_IN[name], __package__)
        factory = _FACTORIES.get(name)
        if factory is None:
            known = ", ".join(sorted({*_FACTORIES, *_BUILT_IN}))
            raise ConfigError(f"kv_connector={name!r} is not known; registered: {known}")
        return factory(config)
    try:
        connector_class = getattr(import_module(path), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"kv_connector={name!r} is not in {path!r}: {error}") from error
    if not (isinstance(connector_class, type) and issubclass(connector_class, KVConnector)):
        raise ConfigError(f"kv_connector={name!r} in {path!r} is not a subclass of KVConnector")
    connector: KVConnector = connector_class(config)  # type: ignore[call-arg]
    return connector
