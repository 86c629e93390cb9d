"""Messages between a process that uses grammars and its grammar processes, which compile and advance them."""

from typing import Final, TypeAlias

import msgspec

from ..isolation.messages import Exited
from ..sampling_params import StructuredOutput

MAX_CPU_S: Final = 5
"""Maximum CPU time of a check, in seconds."""

ISOLATED_CPU_S: Final = 20
"""Maximum CPU time of one call to an isolated grammar, in seconds.

Sufficient for every grammar that passed the check, even if the machine has become slower.
"""

MAX_WALL_S: Final = 60
"""Seconds without progress after which a grammar process is killed."""

MAX_MEMORY_BYTES: Final = 512 << 20
"""Maximum memory of a grammar process in bytes, in addition to the tokenizer."""

CHECK_STACK_BYTES: Final = 8 << 20
"""Stack size for checking a grammar, in bytes. It limits the depth of rules, references and nesting."""

ISOLATED_STACK_BYTES: Final = 32 << 20
"""Stack size for an isolated grammar, in bytes. Sufficient for every grammar that passed the check."""

SHARED_STACK_BYTES: Final = 64 << 20
"""Stack size for compiling a grammar in the core, in bytes."""


class Check(msgspec.Struct, tag=6, array_like=True):
    """Compile a grammar and measure the cost of its tokens. Answered by `Verdict`.

    Its `parts` are compiled first, so that an error can name the part.
    """

    structured_output: StructuredOutput
    parts: list[StructuredOutput] = []


class Compile(msgspec.Struct, tag=1, array_like=True):
    """Compile the grammar that this process will serve. Answered by `Mask` or `Failed`."""

    structured_output: StructuredOutput


class Advance(msgspec.Struct, tag=2, array_like=True):
    """Accept tokens. Answered by `Mask` or `Failed`."""

    token_ids: list[int]


class Verdict(msgspec.Struct, tag=3, array_like=True):
    """The result of a `Check`.

    `problem` says why the grammar, or its part number `part`, cannot be used. `is_isolated` is set if it must run in
    its own process. `spec` replaces the grammar's specification if patterns had to be dropped; None if none was.
    """

    problem: str = ""
    is_isolated: bool = False
    part: int | None = None
    spec: str | None = None

    def apply_to(self, output: StructuredOutput) -> StructuredOutput:
        """Return the checked grammar in its form for the core."""
        spec = output.spec if self.spec is None else self.spec
        return msgspec.structs.replace(output, spec=spec, is_isolated=self.is_isolated)


class Mask(msgspec.Struct, tag=4, array_like=True):
    """The tokens that may come next, one bit per token."""

    bits: bytes


class Failed(msgspec.Struct, tag=5, array_like=True):
    """The grammar cannot be used, for the given reason."""

    reason: str


Request: TypeAlias = Check | Compile | Advance
Reply: TypeAlias = Verdict | Mask | Failed | Exited

decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
