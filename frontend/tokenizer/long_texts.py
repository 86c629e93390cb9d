"""Encode long texts in other processes.

The tokenizers library blocks all threads while it copies a text and its tokens, which takes 20 ms for a megabyte.
"""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path
from subprocess import PIPE
from typing import Final, cast

import numpy as np

from ...protocol.errors import ParameterError

LONG_TEXT: Final = 1 << 18
"""Maximum characters of a text that is encoded in this process."""

HEAD: Final = struct.Struct("<??Q")
"""Header of a text: whether to add special tokens, whether those in it are plain text, and its number of bytes."""

REPLY: Final = struct.Struct("<?Q")
"""Header of a reply: whether it is an error, and its number of bytes."""

MAX_MEMORY_BYTES: Final = 4 << 30
"""Maximum memory for encoding one text, in bytes."""

PIECE: Final = 1 << 16


class LongTexts:
    """Encodes long texts. Each thread that uses it has its own process, which is started on demand."""

    def __init__(self, directory: Path) -> None:
        """Prepare to start processes. `directory` contains the tokenizer.json."""
        self._directory = directory
        self._threads = threading.local()

    def encode(
        self, text: str, *, add_special_tokens: bool, special_is_text: bool = False
    ) -> Sequence[int]:
        """Return the token IDs of a text, as a view of int32.

        Raises:
            ParameterError: Encoding the text needs too much memory.
            ValueError: The process cannot encode it.
        """
        # Other threads can run between two pieces.
        pieces = [text[start : start + PIECE].encode() for start in range(0, len(text), PIECE)]
        head = HEAD.pack(add_special_tokens, special_is_text, sum(map(len, pieces)))
        process = getattr(self._threads, "process", None)
        reply = None if process is None else _exchange(process, [head, *pieces])
        if reply is None:
            # An idle process may have been killed, so this text may not be the cause of its exit.
            process = self._threads.process = self._start()
            reply = _exchange(process, [head, *pieces])
        if reply is None:
            self._threads.process = None
            raise ParameterError(
                "prompt",
                f"needs more than {MAX_MEMORY_BYTES >> 20} MiB of memory to be tokenized; send a shorter "
                "text",
            )
        is_error, content = reply
        if is_error:
            raise ValueError(bytes(content).decode())
        return content.cast("i")

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"{__package__}.long_text_process", str(self._directory)]
        try:
            return subprocess.Popen(command, stdin=PIPE, stdout=PIPE)
        except OSError as error:
            raise ParameterError(
                "prompt", f"is long, and its tokenizer process cannot be started: {error.strerror}"
            ) from None


def _exchange(
    process: subprocess.Popen[bytes], parts: list[bytes]
) -> tuple[bool, memoryview] | None:
    """Send a text and return (is an error, reply); None if the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError):
        for part in parts:
            process.stdin.write(part)
        process.stdin.flush()
        head = process.stdout.read(REPLY.size)
        if len(head) == REPLY.size:
            is_error, size = REPLY.unpack(head)
            # Other threads can run while this memory is filled. A `bytes` object would have to be copied.
            content = np.empty(size, np.uint8).data
            if cast(BufferedReader, process.stdout).readinto(content) == size:
                return is_error, content
    process.kill()
    process.communicate()
    return None
