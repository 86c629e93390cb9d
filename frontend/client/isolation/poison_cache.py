"""A cache of requests that caused crashes, so that repeating one does not crash the engine again."""

from __future__ import annotations

import time
from hashlib import blake2b
from typing import Final

import msgspec

from ....protocol.messages import EngineCoreRequest

REMEMBERED_S: Final = 300.0
"""Seconds for which a request that caused crashes (a poison request) is rejected."""
MAX_REMEMBERED: Final = 1024
"""Maximum requests in the cache."""


class PoisonCache:
    """The poison requests of this frontend: the last `MAX_REMEMBERED`, each for `REMEMBERED_S` seconds."""

    def __init__(self) -> None:
        self._added_at: dict[bytes, float] = {}

    def add_request(self, request: EngineCoreRequest) -> None:
        """Add a request that caused crashes."""
        key = _digest(request)
        self._added_at.pop(key, None)
        self._added_at[key] = time.monotonic()
        if len(self._added_at) > MAX_REMEMBERED:
            del self._added_at[next(iter(self._added_at))]

    def __contains__(self, request: EngineCoreRequest) -> bool:
        if not self._added_at:
            return False
        added_at = self._added_at.get(_digest(request))
        return added_at is not None and time.monotonic() - added_at < REMEMBERED_S


def _digest(request: EngineCoreRequest) -> bytes:
    """Return a hash of the fields that workers see, except the seed, which may differ in each repetition."""
    asked = EngineCoreRequest(
        0,
        request.prompt_token_ids,
        msgspec.structs.replace(request.sampling_params, seed=0),
        0.0,
        eos_token_ids=request.eos_token_ids,
        lora=request.lora,
        encoder_inputs=request.encoder_inputs,
        predicted_token_ids=request.predicted_token_ids,
        pooling_params=request.pooling_params,
    )
    return blake2b(msgspec.msgpack.encode(asked), digest_size=16).digest()
