"""Messages between a process that uses grammars and the disposable processes that compile them."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from ..sampling_params import StructuredOutput

LENGTH_BYTES: Final = 4
"""Bytes of the big-endian length before each message."""

MAX_CPU_S: Final = 5
"""Seconds of processor time that one request to such a process may take."""

MAX_WALL_S: Final = 60
"""Seconds after which a process that has stopped making progress is killed."""

MAX_MEMORY_BYTES: Final = 512 << 20
"""Memory of a grammar beside that of the tokenizer."""

CHECK_STACK_BYTES: Final = 8 << 20
"""Stack in which a grammar is checked. It bounds the depth of rules, references and nesting."""

ISOLATED_STACK_BYTES: Final = 32 << 20
"""Stack in which an isolated grammar is used: what passed the check must not overflow it."""

SHARED_STACK_BYTES: Final = 64 << 20
"""Stack in which the core compiles a grammar that it shares a process with."""


class Check(msgspec.Struct, tag=0, array_like=True):
    """Compile a grammar, and try how much its tokens cost. Answered by a Verdict.

    The `parts` of it are compiled before it, so that an error names the part.
    """

    structured_output: StructuredOutput
    parts: list[StructuredOutput] = []


class Compile(msgspec.Struct, tag=1, array_like=True):
    """Compile the grammar that the process is for. Answered by a Mask or by Failed."""

    structured_output: StructuredOutput


class Advance(msgspec.Struct, tag=2, array_like=True):
    """Accept tokens. Answered by a Mask or by Failed."""

    token_ids: list[int]


class Verdict(msgspec.Struct, tag=3, array_like=True):
    """`problem` says why the grammar, or one of its parts, cannot be used; `is_isolated`, that it needs a process."""

    problem: str = ""
    is_isolated: bool = False
    part: int | None = None


class Mask(msgspec.Struct, tag=4, array_like=True):
    """The tokens that may come next, one bit each."""

    bits: bytes


class Failed(msgspec.Struct, tag=5, array_like=True):
    reason: str


class Exited(msgspec.Struct, tag=6, array_like=True):
    """The process has ended by a signal (0: by none), which its parent reports."""

    signal: int


Request: TypeAlias = Check | Compile | Advance
Reply: TypeAlias = Verdict | Mask | Failed | Exited

_encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def frame(message: Request | Reply) -> bytes:
    """Encode a message with its length before it."""
    body = _encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
