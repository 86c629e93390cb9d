"""`python -m engine.frontend.tokenizer.long_text_process FD DIRECTORY`: forks processes that encode long texts."""

from __future__ import annotations

import functools
import os
import socket
import sys
from array import array
from typing import Final

import msgspec

from ...protocol.isolation.channel import receive, send
from ...protocol.isolation.fork_server import Serve, run_fork_server
from ...protocol.isolation.limits import limit_time
from .load import load_tokenizer
from .long_texts import MAX_MEMORY_BYTES, Encode, Encoded

_decode: Final = msgspec.msgpack.Decoder(Encode).decode


def _load(directory: str) -> Serve:
    tokenizer = load_tokenizer(directory)
    literal_encoder = functools.cache(tokenizer.literal_encoder)

    def serve(client: socket.socket) -> None:
        while (received := receive(client)) is not None:
            request = _decode(received[0])
            with received[1] as content:
                text = content.read(request.size).decode()
            encoder = literal_encoder() if request.special_is_text else tokenizer
            try:
                with limit_time(0, request.wall_s):
                    encoded = encoder.encode(text, request.add_special_tokens)
                    token_ids = array("i", encoded).tobytes()
            except ValueError as error:
                send(client, Encoded(error=str(error)), ())
            else:
                send(client, Encoded(len(token_ids)), (token_ids,))
        os._exit(0)

    return serve


def main() -> None:
    """Serve sockets until the process that started this one exits."""
    fd, directory = sys.argv[1:]
    run_fork_server(
        socket.socket(fileno=int(fd)), "long texts", lambda: _load(directory), MAX_MEMORY_BYTES
    )


if __name__ == "__main__":
    main()
