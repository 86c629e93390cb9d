"""`python -m engine.frontend.media.decoding.decoder_process FD SETUP`: forks processes that decode media and documents.

A file may crash a decoder, or make it loop or take unlimited memory. The loss of a process fails only one request.
`SETUP` is a `Setup` as JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
from collections.abc import Iterable
from typing import Any, Final, NoReturn

import msgspec

from ....protocol.errors import ParameterError
from ....protocol.isolation.channel import SharedContent, receive, send
from ....protocol.isolation.fork_server import Serve, run_fork_server
from ....protocol.isolation.limits import limit_time
from ..audio.decode import AudioReader
from ..documents.pdf import read_pdf
from ..media_reader import MediaReader, PreparedImage
from .limits import DecoderLimits
from .messages import (
    DocumentText,
    OpenAudio,
    Opened,
    Prepared,
    ReadDocument,
    ReadImage,
    ReadSamples,
    ReadVideo,
    Refused,
    Request,
    Setup,
    Source,
    decode_request,
)

_LIBRARIES: Final = ("av", "pypdf", "soundfile")
"""Optional packages that are imported before the fork."""


class _Child:
    """Serves one client: images and videos one after another, and one clip at a time."""

    def __init__(
        self, client: socket.socket, reader: MediaReader | None, limits: DecoderLimits
    ) -> None:
        self._client = client
        self._reader, self._limits = reader, limits
        self._clip: AudioReader | None = None

    def run(self) -> NoReturn:
        """Serve requests until the client closes the socket, then exit."""
        while (received := receive(self._client)) is not None:
            message, content = received
            request = decode_request(message)
            with content, limit_time(self._limits.cpu_s, self._limits.wall_s):
                reply, parts = self._answer(request, content)
            send(self._client, reply, parts)
        os._exit(0)

    def _answer(
        self, request: Request, content: SharedContent
    ) -> tuple[Prepared | Opened | DocumentText | Refused, Iterable[bytes | memoryview]]:
        try:
            match request:
                case ReadImage(where, source, num_images, fields, header):
                    [file] = _read(source, content)
                    assert self._reader is not None
                    return _reply(self._reader.read_image(file, where, num_images, fields, header))
                case ReadVideo(where, source, sampling, fields):
                    given: Any = _read(source, content)
                    assert self._reader is not None
                    if not source.is_list:
                        [given] = given
                    return _reply(self._reader.read_video(given, sampling, where, fields))
                case OpenAudio(where, rate, max_seconds, limit, size, may_be_silent):
                    data = content.read(size)
                    self._clip = AudioReader(
                        data, where, rate, max_seconds, limit, may_be_silent=may_be_silent
                    )
                    return Opened(), ()
                case ReadSamples(_, num_samples):
                    assert self._clip is not None
                    samples = self._clip.read(num_samples)
                    if len(samples) < num_samples:
                        self._clip = None
                    return Opened(samples.nbytes), (samples.data,)
                case ReadDocument(where, size, max_characters):
                    text = read_pdf(content.read(size), where, max_characters).encode()
                    return DocumentText(len(text)), (text,)
        except ParameterError as error:
            return Refused(error.param, error.problem), ()
        except MemoryError:
            return Refused(request.where, self._limits.memory_problem), ()
        # For damaged files, the decoders raise many kinds of errors.
        except Exception as error:
            reason = str(error) or type(error).__name__
            return Refused(request.where, f"cannot be decoded: {reason}; send another file"), ()


def _read(source: Source, content: SharedContent) -> list[str] | list[bytes]:
    parts = [content.read(size) for size in source.sizes]
    return [part.decode(errors="surrogatepass") for part in parts] if source.is_text else parts


def _reply(prepared: PreparedImage) -> tuple[Prepared, Iterable[bytes]]:
    inputs = [msgspec.structs.replace(item, data=b"") for item in prepared.inputs]
    data = [item.data for item in prepared.inputs]
    return Prepared(prepared.text, inputs, [len(part) for part in data], prepared.is_video), data


def _load(setup: Setup) -> Serve:
    reader = None if setup.reader is None else MediaReader(setup.reader)
    for name in _LIBRARIES:
        with contextlib.suppress(ImportError, OSError):
            importlib.import_module(name)
    return lambda client: _Child(client, reader, setup.limits).run()


def main() -> None:
    """Serve sockets until the process that started this one exits."""
    fd, setup_json = sys.argv[1:]
    setup = msgspec.json.decode(setup_json, type=Setup)
    control = socket.socket(fileno=int(fd))
    run_fork_server(control, "media decoder", lambda: _load(setup), setup.limits.memory_bytes)


if __name__ == "__main__":
    main()
