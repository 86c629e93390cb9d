"""`python -m engine.frontend.api.bodies.decoder_process FD STRICT LOG_LEVEL LOG_FORMAT`: forks processes that decode.

A JSON decoder blocks all threads of its process, takes many times the memory of the text, and reads untrusted input. So
large bodies are decoded in such a process. The kernel kills it if a body takes too much processor time.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from ....protocol.isolation.channel import receive, send
from ....protocol.isolation.fork_server import Serve, run_fork_server
from ....protocol.isolation.limits import limit_time
from ....protocol.process import configure_logging
from ...http.errors import APIError
from .body import BodyDecoder, make_decoder
from .messages import (
    MAX_CPU_S,
    MAX_MEMORY_BYTES,
    SCHEMAS,
    Answer,
    Refused,
    Reply,
    decode_request,
    encode_reply,
    pack,
    too_large,
)
from .structure import MAX_OTHER_VALUES, verify_count


def _decode(decoder: BodyDecoder[Any], body: bytes, num_values: int) -> Reply:
    try:
        decoded, num_token_ids = pack(decoder.decode(body))
        verify_count("values other than token ids", num_values - num_token_ids, MAX_OTHER_VALUES)
    except APIError as error:
        return _refused(error)
    return decoded


def _refused(error: APIError) -> Refused:
    return Refused(error.status, error.message, error.param, error.code)


def _load(is_strict: bool, log_level: str, log_format: str) -> Serve:
    # The standard error of the processes is discarded.
    sys.stderr = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)
    configure_logging("body decoder", log_level, "json" if log_format == "json" else "text")
    decoders = [make_decoder(schema, is_strict) for schema in SCHEMAS]

    def serve(client: socket.socket) -> None:
        while (received := receive(client)) is not None:
            request = decode_request(received[0])
            with received[1] as content, limit_time(MAX_CPU_S):
                try:
                    body = content.read(request.size)
                    decoder = decoders[request.schema]
                    reply = encode_reply(_decode(decoder, body, request.num_values))
                except MemoryError:
                    reply = encode_reply(_refused(too_large()))
            send(client, Answer(len(reply)), (reply,))
            del body, reply
        os._exit(0)

    return serve


def main() -> None:
    """Serve sockets until the process that started this one exits."""
    fd, is_strict, log_level, log_format = sys.argv[1:]
    run_fork_server(
        socket.socket(fileno=int(fd)),
        "body decoder",
        lambda: _load(is_strict == "True", log_level, log_format),
        MAX_MEMORY_BYTES,
    )


if __name__ == "__main__":
    main()
