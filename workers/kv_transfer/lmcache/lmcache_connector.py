"""The worker side of the KV connector to LMCache."""

from __future__ import annotations

from typing import Final

from ....protocol.errors import ConfigError
from ....protocol.kv_transfer.store import LMCACHE_CONNECTOR, StoreReport
from ..connector import ConnectorContext, register_connector
from ..store_connector import StoreConnector
from .lmcache_store import LMCacheStore

PREFIX: Final = "lmcache."
"""The beginning of the names of LMCache's settings in the extra configuration, as in vLLM."""

TIMEOUT_S: Final = 10.0
"""Default of `timeout_s`: seconds after which LMCache counts as failed if it has not answered."""


class LMCacheConnector(StoreConnector):
    """Stores blocks in LMCache. It is asked for the blocks of each request, because it has no index.

    Raises:
        ConfigError: LMCache is missing, or rejected its configuration.
    """

    def __init__(self, context: ConnectorContext) -> None:
        extra = context.transfer.kv_connector_extra_config
        timeout_s = extra.get("timeout_s", TIMEOUT_S)
        if not isinstance(timeout_s, int | float) or timeout_s <= 0:
            raise ConfigError(
                f"kv_connector_extra_config: timeout_s must be a positive number, got {timeout_s!r}"
            )
        settings = {
            name.removeprefix(PREFIX): value
            for name, value in extra.items()
            if name.startswith(PREFIX)
        }
        parallel = context.config.parallel
        try:
            store = LMCacheStore(
                context.fingerprint,
                context.rank,
                parallel.workers_per_core,
                context.memory.block_bytes,
                settings,
                timeout_s,
            )
        except ImportError as error:
            raise ConfigError(
                f"kv_connector {LMCACHE_CONNECTOR!r}: LMCache cannot be imported ({error}); install the extra "
                "engine-serve[lmcache], or use 'disk'"
            ) from error
        except Exception as error:
            raise ConfigError(
                f"kv_connector {LMCACHE_CONNECTOR!r}: LMCache cannot start: {type(error).__name__}: {error}; correct "
                "the file that LMCACHE_CONFIG_FILE names, or its other settings"
            ) from error
        super().__init__("LMCache", context.memory, store)
        self._start()

    def _report_state(self) -> None:
        self._report(StoreReport(capacity=self._capacity))


register_connector(LMCACHE_CONNECTOR, LMCacheConnector)
