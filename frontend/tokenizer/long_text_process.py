"""`python -m engine.frontend.tokenizer.long_text_process DIRECTORY`: encodes long texts for a frontend.

It reads texts from standard input one at a time and writes their token IDs to standard output. It exits when standard
input ends, which happens when its frontend exits.
"""

from __future__ import annotations

import contextlib
import functools
import resource
import sys
from array import array

from ...protocol.process import ignore_stop_signals, name_process
from .load import load_tokenizer
from .long_texts import HEAD, MAX_MEMORY_BYTES, REPLY


def main() -> None:
    """Encode texts until standard input ends."""
    [directory] = sys.argv[1:]
    name_process("long texts")
    ignore_stop_signals()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    tokenizer = load_tokenizer(directory)
    literal_encoder = functools.cache(tokenizer.literal_encoder)
    texts, replies = sys.stdin.buffer, sys.stdout.buffer
    while head := texts.read(HEAD.size):
        add_special_tokens, special_is_text, size = HEAD.unpack(head)
        text = texts.read(size)
        if len(text) < size:
            return
        is_error = False
        encoder = literal_encoder() if special_is_text else tokenizer
        try:
            reply = array("i", encoder.encode(text.decode(), add_special_tokens)).tobytes()
        except ValueError as error:
            is_error, reply = True, str(error).encode()
        replies.write(REPLY.pack(is_error, len(reply)))
        replies.write(reply)
        replies.flush()


if __name__ == "__main__":
    main()
