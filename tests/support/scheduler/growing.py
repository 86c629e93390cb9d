"""Requests of the scheduler's harness whose encoder inputs grow while they run."""

from __future__ import annotations

import msgspec
from engine.frontend.client.encoder_inputs import grow_request
from engine.protocol.block_hash import HASH_BYTES
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.protocol.messages import AppendInputs
from support.scheduler.client_view import Key
from support.scheduler.harness import Harness


def part(position: int, num_tokens: int, salt: int = 0) -> EncoderInput:
    """Return a part of a clip. Clips with different salts are different."""
    content_hash = f"{salt} {position}".encode().ljust(HASH_BYTES)
    return EncoderInput(position, num_tokens, content_hash, num_tokens, b"sound")


def grow(harness: Harness, key: Key, num_tokens: int, *, is_last: bool = False) -> None:
    """Append a part of a clip to a request, as its client does."""
    message = harness.received[key].message
    end = max((item.position + item.num_tokens for item in message.encoder_inputs), default=0)
    growth = grow_request(message, [part(end, num_tokens, key[1])], is_last=is_last)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(growth), type=AppendInputs)
    harness.scheduler.append_inputs(key[0], sent)
