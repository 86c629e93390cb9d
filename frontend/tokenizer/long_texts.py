"""Encode long texts in other processes.

The tokenizers library blocks all threads while it copies a text and its tokens, which takes 20 ms for a megabyte.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from ...protocol.errors import ParameterError
from ...protocol.isolation.messages import Exited
from ...protocol.isolation.pool import Lost, ProcessPool

LONG_TEXT: Final = 1 << 18
"""Maximum characters of a text that is encoded in this process."""

MAX_MEMORY_BYTES: Final = 4 << 30
"""Maximum memory for encoding one text, in bytes."""

MAX_WALL_S: Final = 60.0
"""Seconds after which a process that has not encoded a text is killed, besides those for the size of the text."""

WALL_S_PER_MIB: Final = 30.0
"""Seconds for each MiB of a text; a busy machine took 6."""

PIECE: Final = 1 << 16

MAX_IDLE: Final = 2
"""Maximum number of idle processes."""


class Encode(msgspec.Struct, tag=1, array_like=True):
    """A request to encode the content, `size` bytes of UTF-8, within `wall_s` seconds.

    With `special_is_text`, special tokens are plain text.
    """

    size: int
    wall_s: float
    add_special_tokens: bool
    special_is_text: bool


class Encoded(msgspec.Struct, tag=2, array_like=True):
    """The reply whose content is the token IDs, int32, with this size in bytes. If `error` is given, there are none."""

    size: int = 0
    error: str = ""


Reply: TypeAlias = Encoded | Exited


class LongTexts(ProcessPool[Encoded]):
    """Encodes long texts with the tokenizer.json in a directory. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            f"{__package__}.long_text_process",
            lambda: [str(directory)],
            msgspec.msgpack.Decoder(Reply).decode,
            None,
            MAX_IDLE,
        )

    def encode(
        self, text: str, *, add_special_tokens: bool, special_is_text: bool = False
    ) -> Sequence[int]:
        """Return the token IDs of a text, as a view of int32.

        Raises:
            ParameterError: Encoding the text needs too much memory or time.
            UnavailableError: No process can be started.
            ValueError: The process cannot encode it.
        """
        # Other threads can run between two pieces.
        pieces = [text[start : start + PIECE].encode() for start in range(0, len(text), PIECE)]
        size = sum(map(len, pieces))
        wall_s = MAX_WALL_S + WALL_S_PER_MIB * size / (1 << 20)
        request = Encode(size, wall_s, add_special_tokens, special_is_text)
        try:
            with self.exchange("prompt", request, pieces) as (reply, content):
                token_ids = memoryview(content.read(reply.size)).cast("i")
        except Lost as error:
            needed = f"needs more than {MAX_MEMORY_BYTES >> 20} MiB of memory"
            if error.signal == signal.SIGALRM:
                needed = f"takes more than {wall_s:.0f} s"
            raise ParameterError(
                "prompt", f"{needed} to be tokenized; send a shorter text"
            ) from None
        if reply.error:
            raise ValueError(reply.error)
        return token_ids
