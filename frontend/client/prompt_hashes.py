"""Compute the hashes of prompt blocks, by which cores find cached prefixes."""

from __future__ import annotations

import asyncio
from typing import Final

from ...protocol.arrays import Int32Array, int32_view
from ...protocol.block_hash import HASH_BYTES, hash_blocks, root_hash
from ...protocol.config import CacheConfig
from ...protocol.encoder_inputs.inputs import EncoderInput
from ...protocol.messages import EngineCoreRequest
from .sequence_io import SequenceRequest

HASHED_AT_ONCE: Final = 4096
"""Prompt tokens hashed before other tasks run; takes well under a millisecond."""

MIN_TOKENS_HASHED: Final = 64
"""The fixed cost of hashing a prompt, as the number of tokens that take the same time."""


async def hash_prompts(
    sequences: list[SequenceRequest], requests: list[EngineCoreRequest], config: CacheConfig
) -> None:
    """Set the hashes of the full prompt blocks in `requests`. Equal prompts (the same object) are hashed once."""
    if not config.enable_prefix_caching:
        return
    hashed: dict[tuple[object, ...], tuple[bytes, bytes]] = {}
    num_hashed = 0
    for sequence, request in zip(sequences, requests, strict=True):
        salt, owner, lora = sequence.cache_salt, sequence.cache_owner, sequence.lora
        version = None if lora is None else lora.version
        inputs = tuple(item.content_hash for item in request.encoder_inputs)
        key = (id(sequence.prompt_token_ids), salt, owner, version, inputs)
        if key not in hashed:
            root = root_hash(cache_salt=salt, lora_version=version, owner=owner)
            prompt = int32_view(request.prompt_token_ids)
            hashed[key] = root, await _hash_blocks(prompt, root, request.encoder_inputs, config)
            num_hashed += len(prompt) + MIN_TOKENS_HASHED
            if num_hashed > HASHED_AT_ONCE:
                num_hashed = 0
                await asyncio.sleep(0)
        request.root_hash, request.block_hashes = hashed[key]


async def _hash_blocks(
    prompt: Int32Array, root: bytes, encoder_inputs: list[EncoderInput], config: CacheConfig
) -> bytes:
    block_size, algorithm = config.block_size, config.prefix_hash
    slice_tokens = max(HASHED_AT_ONCE // block_size, 1) * block_size
    inputs = [(item.position, item.num_tokens, item.content_hash) for item in encoder_inputs]
    hashes = hash_blocks(prompt[:slice_tokens], block_size, root, inputs, algorithm)
    for start in range(slice_tokens, len(prompt), slice_tokens):
        await asyncio.sleep(0)
        parent = hashes[-HASH_BYTES:]
        piece = prompt[start : start + slice_tokens]
        placed = [(position - start, size, hashed) for position, size, hashed in inputs]
        hashes += hash_blocks(piece, block_size, parent, placed, algorithm)
    return hashes
