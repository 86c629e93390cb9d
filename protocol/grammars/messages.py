"""Messages between a process that uses grammars and the grammar processes that compile them."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from ..isolation.messages import Exited
from ..sampling_params import StructuredOutput

MAX_CPU_S: Final = 5
"""Maximum processor time of a check, in seconds."""

ISOLATED_CPU_S: Final = 20
"""Maximum processor time of a request to an isolated grammar, in seconds.

Enough for every grammar that passed the check, also if the machine has become slower.
"""

MAX_WALL_S: Final = 60
"""Seconds after which a grammar process that makes no progress is killed."""

MAX_MEMORY_BYTES: Final = 512 << 20
"""Maximum memory of a grammar, not counting the tokenizer, in bytes."""

CHECK_STACK_BYTES: Final = 8 << 20
"""Stack for checking a grammar. It bounds the depth of rules, references and nesting."""

ISOLATED_STACK_BYTES: Final = 32 << 20
"""Stack for an isolated grammar; large enough for every grammar that passed the check."""

SHARED_STACK_BYTES: Final = 64 << 20
"""Stack for compiling a grammar in the core."""


class Check(msgspec.Struct, tag=6, array_like=True):
    """Compile a grammar and measure the cost of its tokens. Answered by a Verdict.

    Its `parts` are compiled first, so that an error can name the part.
    """

    structured_output: StructuredOutput
    parts: list[StructuredOutput] = []


class Compile(msgspec.Struct, tag=1, array_like=True):
    """Compile the grammar of this process. Answered by Mask or Failed."""

    structured_output: StructuredOutput


class Advance(msgspec.Struct, tag=2, array_like=True):
    """Accept tokens. Answered by Mask or Failed."""

    token_ids: list[int]


class Verdict(msgspec.Struct, tag=3, array_like=True):
    """The result of a Check.

    `problem` says why the grammar, or its part number `part`, cannot be used. `is_isolated` is set if it needs its own
    process. `spec` is the grammar's own without the patterns that were dropped, None if none was.
    """

    problem: str = ""
    is_isolated: bool = False
    part: int | None = None
    spec: str | None = None


class Mask(msgspec.Struct, tag=4, array_like=True):
    """The tokens that may come next, one bit each."""

    bits: bytes


class Failed(msgspec.Struct, tag=5, array_like=True):
    """The grammar cannot be used, for the given reason."""

    reason: str


Request: TypeAlias = Check | Compile | Advance
Reply: TypeAlias = Verdict | Mask | Failed | Exited

decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
