"""Blocks in LMCache, by way of its in-process engine (`lmcache.v1.cache_engine`)."""

from __future__ import annotations

import hashlib
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch

from .timed_calls import TimedCalls

T = TypeVar("T")

CHECKSUM_BYTES: Final = 4
"""Size in bytes of the CRC-32 of key and block that follows each block in LMCache."""

START_S: Final = 120.0
"""Seconds that LMCache may take to start. Its imports alone take many seconds."""

KEYS_PER_CALL: Final = 64
POLL_S: Final = 0.001
"""Seconds between two checks of whether a block has been written."""

SETTINGS: Final = {
    # One chunk of one "token" is a block of Engine.
    "chunk_size": 1,
    "save_unfull_chunk": False,
    "use_layerwise": False,
    "enable_blending": False,
    "enable_async_loading": False,
}
"""The settings of LMCache that have to have these values."""


class LMCacheStore:
    """Blocks in the memory, on the disks and at the servers that LMCache is configured to use.

    LMCache reads its configuration from the file that LMCACHE_CONFIG_FILE names, and from variables LMCACHE_*.

    Args:
        fingerprint: Blocks with other fingerprints are not found.
        rank: The rank of this worker in its replica, which has `num_workers`.
        block_bytes: Size of each block in bytes.
        settings: Settings that take precedence over those of the file.
        timeout_s: Seconds after which a call that has not returned has failed.

    Raises:
        ImportError: The package, or one that it needs, cannot be imported.
        OSError: LMCache did not start in time.
        Exception: LMCache rejected its configuration.
    """

    def __init__(
        self,
        fingerprint: bytes,
        rank: int,
        num_workers: int,
        block_bytes: int,
        settings: Mapping[str, object],
        timeout_s: float,
    ) -> None:
        self._name = f"engine-{fingerprint.hex()[:32]}"
        self._rank = rank
        self._num_workers = num_workers
        self._block_bytes = block_bytes
        self._timeout_s = timeout_s
        self._shape = torch.Size((1, 1, 1, block_bytes + CHECKSUM_BYTES))
        self._calls = TimedCalls()
        self._calls.call(START_S, self._open, settings)

    def look_up(self, keys: Sequence[bytes]) -> bytes:
        """Return a byte for each key: 1 if LMCache has the block, else 0."""
        mask = b""
        for start in range(0, len(keys), KEYS_PER_CALL):
            mask += self._call(self._contain, keys[start : start + KEYS_PER_CALL])
        return mask

    def append(self, key: bytes, data: memoryview) -> bool:
        """Store a block, and wait until it is stored. Return False if LMCache has no memory for it."""
        # The caller may overwrite the data if the call does not return in time.
        return self._call(self._put, key, bytes(data))

    def read(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Fill the parts of a block. Return False if the block is missing or damaged."""
        data = self._call(self._get, key)
        if data is None:
            return False
        start = 0
        for part in parts:
            part[:] = data[start : start + len(part)]
            start += len(part)
        return True

    def remove(self, keys: Sequence[bytes]) -> None:
        """Delete blocks, where LMCache can."""
        for key in keys:
            self._call(self._storage.remove, self._key(key))

    def clear(self) -> None:
        """Delete all blocks, where LMCache can: in memory and on local disks, not at servers."""
        self._call(self._storage.clear)

    def close(self) -> None:
        """Stop LMCache."""
        self._call(self._destroy)

    def _call(self, function: Callable[..., T], *args: object) -> T:
        """Return the result of a call. Raise OSError if the call failed, or did not return in time."""
        try:
            return self._calls.call(self._timeout_s, function, *args)
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    # Called in threads that may be discarded

    def _open(self, settings: Mapping[str, object]) -> None:
        # LMCache logs every step of its start, and reports its use to its authors.
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
        os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
        from lmcache.utils import CacheEngineKey, mock_up_broadcast_fn, mock_up_broadcast_object_fn
        from lmcache.v1.cache_engine import LMCacheEngineBuilder
        from lmcache.v1.config import load_engine_config_with_overrides
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.metadata import LMCacheMetadata

        config = load_engine_config_with_overrides(overrides={**settings, **SETTINGS})
        metadata = LMCacheMetadata(
            model_name=self._name,
            world_size=self._num_workers,
            local_world_size=self._num_workers,
            worker_id=self._rank,
            local_worker_id=self._rank,
            kv_dtype=torch.uint8,
            kv_shape=(1, 1, 1, 1, self._shape[-1]),
            role="worker",
            chunk_size=SETTINGS["chunk_size"],
        )
        engine = LMCacheEngineBuilder.get_or_create(
            self._name,
            config,
            metadata,
            None,
            mock_up_broadcast_fn,
            mock_up_broadcast_object_fn,
        )
        engine.post_init()
        self._storage: Any = engine.storage_manager
        self._destroy: Callable[[], None] = lambda: LMCacheEngineBuilder.destroy(self._name)
        self._format: Any = MemoryFormat.KV_2LTD
        self._key_type: Any = CacheEngineKey

    def _key(self, key: bytes) -> Any:
        """Return LMCache's key, whose text may have at most 150 characters."""
        number = int.from_bytes(hashlib.sha256(key).digest()[:16], "big")
        return self._key_type(self._name, self._num_workers, self._rank, number, torch.uint8)

    def _contain(self, keys: Sequence[bytes]) -> bytes:
        return bytes(self._storage.contains(self._key(key)) is not None for key in keys)

    def _put(self, key: bytes, data: bytes) -> bool:
        name = self._key(key)
        if self._storage.contains(name) is not None:
            return True
        target = self._storage.allocate(self._shape, torch.uint8, fmt=self._format, busy_loop=False)
        if target is None:
            return False
        view = memoryview(target.byte_array).cast("B")
        view[: self._block_bytes] = data
        view[self._block_bytes :] = _checksum(key, data)
        self._storage.batched_put([name], [target])
        backends = self._storage.storage_backends.values()
        while any(backend.exists_in_put_tasks(name) for backend in backends):
            time.sleep(POLL_S)
        return True

    def _get(self, key: bytes) -> memoryview | None:
        found = self._storage.get(self._key(key))
        if found is None:
            return None
        try:
            data = bytes(found.byte_array)
        finally:
            found.ref_count_down()
        block = memoryview(data)[: self._block_bytes]
        is_whole = len(data) == self._shape[-1]
        return block if is_whole and data[self._block_bytes :] == _checksum(key, block) else None


def _checksum(key: bytes, data: bytes | memoryview) -> bytes:
    return zlib.crc32(data, zlib.crc32(key)).to_bytes(CHECKSUM_BYTES, "little")
