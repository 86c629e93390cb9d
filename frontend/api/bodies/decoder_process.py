"""`python -m engine.frontend.api.bodies.decoder_process STRICT LOG_LEVEL LOG_FORMAT`: decodes bodies for a frontend.

A JSON decoder blocks all threads of its process, takes many times the memory of the text, and reads untrusted input. So
large bodies are decoded in this process. It reads bodies from standard input one at a time and writes replies to
standard output. The kernel kills it if a body takes too much processor time. It exits when standard input ends, which
happens when its frontend exits.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ....protocol.isolation.limits import limit_memory, limit_time
from ....protocol.process import configure_logging, ignore_stop_signals, name_process
from ...http.errors import APIError
from .body import BodyDecoder, make_decoder
from .messages import (
    HEAD,
    LENGTH,
    MAX_CPU_S,
    MAX_MEMORY_BYTES,
    OUT_OF_MEMORY,
    SCHEMAS,
    Refused,
    Reply,
    encode_reply,
    pack,
)
from .structure import MAX_OTHER_VALUES, verify_count


def _decode(decoder: BodyDecoder[Any], body: bytes, num_values: int) -> Reply:
    try:
        decoded, num_token_ids = pack(decoder.decode(body))
        verify_count("values other than token ids", num_values - num_token_ids, MAX_OTHER_VALUES)
    except APIError as error:
        return Refused(error.status, error.message, error.param, error.code)
    return decoded


def main() -> None:
    """Decode bodies until standard input ends."""
    is_strict, log_level, log_format = sys.argv[1:]
    name_process("body decoder")
    configure_logging("body decoder", log_level, "json" if log_format == "json" else "text")
    ignore_stop_signals()
    decoders = [make_decoder(schema, is_strict == "True") for schema in SCHEMAS]
    limit_memory(MAX_MEMORY_BYTES)
    bodies, replies = sys.stdin.buffer, sys.stdout.buffer
    while head := bodies.read(HEAD.size):
        index, num_values, size = HEAD.unpack(head)
        body = bodies.read(size)
        if len(body) < size:
            return
        with limit_time(MAX_CPU_S):
            try:
                reply = encode_reply(_decode(decoders[index], body, num_values))
            except MemoryError:
                os._exit(OUT_OF_MEMORY)
        replies.write(LENGTH.pack(len(reply)))
        replies.write(reply)
        replies.flush()
        del body, reply


if __name__ == "__main__":
    main()
