"""The scheduler's half of a KV connector: blocks that come from elsewhere, or are wanted there.

The half in the workers moves the bytes. The two meet in `SchedulerOutput.kv_connector_metadata` and
`ModelRunnerOutput.kv_connector_output`, where a transfer is named by its request's `transfer_id`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Final, NamedTuple, TypeAlias

from ..protocol.config import KVTransferConfig
from ..protocol.errors import ConfigError
from ..protocol.kv_events import KVCacheEvent
from ..protocol.messages import FinishReason, SchedulerOutput
from .request import Request


class ExternalMatch(NamedTuple):
    """So many tokens can be loaded beyond those computed already.

    A synchronous load is done by the step that admits the request. An asynchronous one takes as long as it
    takes, and may bring in the last token, too.
    """

    num_tokens: int
    is_async: bool = False


class EndOfRequest(NamedTuple):
    """`delays_free` keeps the blocks until the transfer is reported as sent; `params` go to the client."""

    delays_free: bool = False
    params: dict[str, object] | None = None


class KVConnector(ABC):
    """Asked by the scheduler between steps. An exception ends the request that it was asked about.

    What is not about a live request must never raise: `build_connector_meta`, `transfer_expired`, `take_events`
    and `take_stats`.
    """

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> ExternalMatch | None:
        """What can be loaded after the first `num_computed_tokens` tokens. None to be asked again later."""

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """`block_ids` hold the request's tokens in order; the last `num_external_tokens` found are to be loaded."""

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> bytes:
        """What the workers must know with this step; called once a step."""

    def request_finished(
        self, request: Request, block_ids: Sequence[int], reason: FinishReason
    ) -> EndOfRequest:
        """A request ends that holds these blocks; without blocks there is nothing to delay."""
        return EndOfRequest()

    def transfer_expired(self, transfer_id: int) -> None:  # noqa: B027
        """Delayed blocks were waited for too long. They are reused from the next step on."""

    def take_events(self) -> list[KVCacheEvent]:
        """Events of the connector's own cache since the last call."""
        return []

    def take_stats(self) -> dict[str, float]:
        """Counts since the last call, for the statistics of the step."""
        return {}

    def shutdown(self) -> None:  # noqa: B027
        """Nothing is asked any more."""


ConnectorFactory: TypeAlias = Callable[[KVTransferConfig], KVConnector]

_FACTORIES: Final[dict[str, ConnectorFactory]] = {}


def register_connector(name: str, factory: ConnectorFactory) -> None:
    """Make a connector known. Raises ValueError for a name that is taken."""
    if name in _FACTORIES:
        raise ValueError(f"KV connector {name!r} is registered already")
    _FACTORIES[name] = factory


def create_connector(config: KVTransferConfig) -> KVConnector:
    """The connector that is configured. Raises ConfigError when there is none of that name."""
    name, path = config.kv_connector, config.kv_connector_module_path
    if path is None:
        factory = _FACTORIES.get(name)
        if factory is None:
            known = ", ".join(sorted(_FACTORIES)) or "none"
            raise ConfigError(f"kv_connector={name!r} is not known; registered: {known}")
        return factory(config)
    try:
        connector_class = getattr(import_module(path), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"kv_connector={name!r} is not in {path!r}: {error}") from error
    if not (isinstance(connector_class, type) and issubclass(connector_class, KVConnector)):
        raise ConfigError(f"kv_connector={name!r} in {path!r} is not a KVConnector")
    connector: KVConnector = connector_class(config)  # type: ignore[call-arg]
    return connector
