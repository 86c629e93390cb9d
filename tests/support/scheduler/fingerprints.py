"""KV entries of the model worker: the entry of a position is a fingerprint of all tokens up to it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from engine.protocol.encoder_inputs.inputs import EncoderInput

MASK = (1 << 64) - 1

BAD = -1
"""The entry of a position that was not loaded, or was computed from a position with this entry."""


def extend(fingerprint: int, token_id: int) -> int:
    x = (fingerprint ^ (token_id + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & MASK
    return (x ^ x >> 29) * 0x94D049BB133111EB & MASK


def seed_fingerprint(seed: int | None, lora_name: str = "") -> int:
    """Return the seed of fingerprints for a request. Different salts or adapters must never share a block."""
    return extend(extend(1, seed or 0), zlib.crc32(lora_name.encode()))


def fingerprints(
    token_ids: Iterable[int],
    seed: int | None,
    lora_name: str = "",
    inputs: Sequence[EncoderInput] = (),
) -> list[int]:
    """Return the entry of each position, which depends on all tokens and inputs up to it."""
    fingerprint = seed_fingerprint(seed, lora_name)
    for item in inputs:
        if item.num_tokens == 0:
            fingerprint = extend(fingerprint, zlib.crc32(item.content_hash))
    places, entries = places_of(inputs), []
    for position, token_id in enumerate(token_ids):
        fingerprint = extend_at(fingerprint, token_id, position, places)
        entries.append(fingerprint)
    return entries


def places_of(inputs: Sequence[EncoderInput]) -> dict[int, int]:
    """Return, for each position that an input replaces, a number that identifies the part of the input."""
    return {
        item.position + offset: zlib.crc32(item.content_hash) + offset
        for item in inputs
        for offset in range(item.num_tokens)
    }


def extend_at(fingerprint: int, token_id: int, position: int, places: dict[int, int]) -> int:
    """Return the entry of the token at a position that may read an input."""
    fingerprint = extend(fingerprint, token_id)
    return extend(fingerprint, places[position]) if position in places else fingerprint
