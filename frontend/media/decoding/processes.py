"""The pool of processes that decode media for a frontend."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from ....protocol.arrays import Float32Array
from ....protocol.errors import ParameterError, UnavailableError
from ....protocol.isolation.channel import SharedContent, receive, send
from ....protocol.isolation.messages import Exited, may_be_innocent
from ....protocol.isolation.processes import MAX_TRIES, IsolatedProcesses, is_idle
from ..frame_sampling import Sampling
from ..media_reader import PreparedImage, ReaderConfig
from ..sources.processor_fields import ProcessorField
from .limits import MAX_PROCESSES, DecoderLimits
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
    Reply,
    Request,
    Setup,
    Source,
    decode_reply,
)

_MAX_SKIPPED: Final = 1 << 20
"""Maximum samples, already returned by an earlier process, that are skipped at once."""

MAX_FILES: Final = 100
"""Number of files after which a process is replaced, which bounds the memory that it keeps."""

DEFAULT_LIMITS: Final = DecoderLimits()

_GRACE_S: Final = 5.0


class _Lost(Exception):
    """Raised if a process ended before it replied. `may_be_innocent` is true if the file may not be the reason."""

    def __init__(self, problem: str, *, may_be_innocent: bool) -> None:
        super().__init__(problem)
        self.may_be_innocent = may_be_innocent


class _Process:
    """One process, which decodes files one after another."""

    def __init__(self, connection: socket.socket, limits: DecoderLimits) -> None:
        self._connection = connection
        self._limits = limits
        self._num_files = 0

    @property
    def is_reusable(self) -> bool:
        return self._num_files < MAX_FILES and is_idle(self._connection)

    def close(self) -> None:
        self._connection.close()

    def exchange(
        self, request: Request, content: Sequence[bytes | memoryview]
    ) -> tuple[Reply, SharedContent]:
        """Send a request and its content, and return the reply and its content. Raise _Lost if the process ended."""
        self._num_files += not isinstance(request, ReadSamples)
        # Normally the kernel ends the process before this limit.
        self._connection.settimeout(self._limits.wall_s + _GRACE_S)
        exited: Exited | None = None
        try:
            # If the process has ended, its signal can still be received.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                send(self._connection, request, content)
            # The fork server reports how a process ended, unless the fork server has ended as well.
            if (received := receive(self._connection)) is not None:
                with contextlib.suppress(msgspec.MsgspecError):
                    reply = decode_reply(received[0])
                    if not isinstance(reply, Exited):
                        return reply, received[1]
                    exited = reply
                received[1].close()
        except TimeoutError:
            exited = Exited(signal.SIGALRM)
        except OSError:
            pass
        raise _Lost(
            self._limits.describe_exit(None if exited is None else exited.signal),
            may_be_innocent=may_be_innocent(exited),
        )


class IsolatedAudio:
    """An audio clip that is decoded by its own process, until its end or until it is closed.

    If the process ends and the clip may not be the reason, another one decodes the clip again from its beginning.
    """

    def __init__(self, pool: MediaProcesses, data: bytes, opening: OpenAudio) -> None:
        self._pool, self._data, self._opening = pool, data, opening
        self._process: _Process | None = pool.open_process(data, opening)
        self._num_read = 0
        self._num_decoded = 0
        """Number of samples that the current process has decoded."""
        self._num_losses = 0
        """Number of processes that ended since the last piece."""

    def read(self, num_samples: int) -> Float32Array:
        """Return at least `num_samples` of the next samples, float32 [N]; fewer only at the end.

        Raises:
            ParameterError: The file is damaged, or longer than its header says and than allowed.
        """
        samples: Float32Array | None = None
        while self._process is not None and samples is None:
            try:
                samples = self._read_from(self._process, num_samples)
            except _Lost as error:
                self.close()
                self._num_losses += 1
                if not error.may_be_innocent or self._num_losses == MAX_TRIES:
                    raise ParameterError(self._opening.where, str(error)) from None
                self._process = self._pool.open_process(self._data, self._opening)
                self._num_decoded = 0
        if samples is None:
            return np.zeros(0, np.float32)
        self._num_losses = 0
        self._num_read += len(samples)
        if self._process is not None and len(samples) < num_samples:
            self._pool.put_back(self._process)
            self._process = None
        return samples

    def _read_from(self, process: _Process, num_samples: int) -> Float32Array:
        """Return the samples after those that were read, although this process may not have decoded these yet."""
        kept: list[Float32Array] = []
        wanted = self._num_read + num_samples
        while self._num_decoded < wanted:
            asked = min(wanted - self._num_decoded, max(num_samples, _MAX_SKIPPED))
            samples = self._decode(process, asked)
            before = self._num_read - self._num_decoded
            self._num_decoded += len(samples)
            kept.append(samples[max(before, 0) :])
            if len(samples) < asked:
                break
        return kept[0] if len(kept) == 1 else np.concatenate(kept)

    def _decode(self, process: _Process, num_samples: int) -> Float32Array:
        where = self._opening.where
        reply, content = process.exchange(ReadSamples(where, num_samples), ())
        try:
            with content:
                opened = _expect(reply, Opened)
                return np.frombuffer(content.read(opened.size), np.float32)
        except EOFError as error:
            raise ParameterError(where, str(error)) from None

    def close(self) -> None:
        """End the process, unless it has reached the end of the clip."""
        if self._process is not None:
            self._process.close()
            self._process = None


class MediaProcesses:
    """A pool of processes that decode media. It is thread-safe.

    A file that crashes its process, or takes too long or too much memory, fails only its own request. A process may
    also be killed or stopped for another reason, and so may the process that forks them. Then the file is sent to a
    new process, a few times.

    Args:
        reader: The processor of the model's images; None if it reads only audio clips.
        limits: Limits on the time and memory of decoding a file.
    """

    def __init__(
        self, reader: ReaderConfig | None = None, limits: DecoderLimits = DEFAULT_LIMITS
    ) -> None:
        self._limits = limits
        setup = msgspec.json.encode(Setup(reader, limits)).decode()
        self._processes = IsolatedProcesses(f"{__package__}.decoder_process", lambda: [setup])
        self._lock = threading.Lock()
        self._idle: list[_Process] = []

    def start(self) -> None:
        """Start the processes. Raise OSError if the system refuses."""
        self._processes.start()

    def close(self) -> None:
        """End all processes. No file can be decoded afterwards."""
        self._processes.close()
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    def read_image(
        self,
        source: str | bytes,
        where: str,
        num_images: int,
        fields: tuple[ProcessorField, ...] = (),
    ) -> PreparedImage:
        """Return one of a prompt's images, preprocessed.

        Args:
            source: A data URL, or the content of a file.
            where: The name of the field in errors.
            num_images: The number of the prompt's images.
            fields: The fields of the request, which replace settings of the processor.

        Raises:
            ParameterError: The image cannot be read, or a field is outside the server's limits.
        """
        parts = [_bytes(source)]
        request = ReadImage(where, _describe(source, parts), num_images, fields)
        return self._prepare(request, parts)

    def read_video(
        self,
        source: str | bytes | Sequence[str],
        sampling: Sampling,
        where: str,
        fields: tuple[ProcessorField, ...] = (),
    ) -> PreparedImage:
        """Return a preprocessed video.

        Args:
            source: A data URL, the content of a file, or the data URLs of frames.
            sampling: The choice of frames to read.
            where: The name of the field in errors.
            fields: The fields of the request, which replace settings of the processor.

        Raises:
            ParameterError: The video cannot be read, or a field is outside the server's limits.
        """
        parts = [_bytes(part) for part in ([source] if isinstance(source, str | bytes) else source)]
        request = ReadVideo(where, _describe(source, parts), sampling, fields)
        return self._prepare(request, parts)

    def read_document(self, data: bytes, where: str, max_characters: int) -> str:
        """Return the text of a PDF document.

        Raises:
            ParameterError: The document cannot be read, or has more than `max_characters` characters.
        """
        request = ReadDocument(where, len(data), max_characters)
        process, reply, content = self._exchange(request, [data])
        try:
            with content:
                return content.read(_expect(reply, DocumentText).size).decode()
        except EOFError as error:
            process.close()
            raise ParameterError(where, f"cannot be decoded: {error}") from None
        finally:
            self.put_back(process)

    def open_audio(self, data: bytes, opening: OpenAudio) -> IsolatedAudio:
        """Return an audio clip, which occupies a process until it is closed.

        Raises:
            ParameterError: The clip cannot be read, or is too long.
        """
        return IsolatedAudio(self, data, msgspec.structs.replace(opening, size=len(data)))

    def open_process(self, data: bytes, opening: OpenAudio) -> _Process:
        """Return a process that has opened an audio clip.

        Raises:
            ParameterError: The clip cannot be read, or is too long.
        """
        process, reply, content = self._exchange(opening, [data])
        content.close()
        try:
            _expect(reply, Opened)
        except BaseException:
            self.put_back(process)
            raise
        return process

    def put_back(self, process: _Process) -> None:
        """Keep an idle process for the next file, or end it if there are enough."""
        if process.is_reusable:
            with self._lock:
                if len(self._idle) < MAX_PROCESSES:
                    self._idle.append(process)
                    return
        process.close()

    def _prepare(self, request: ReadImage | ReadVideo, parts: list[bytes]) -> PreparedImage:
        process, reply, content = self._exchange(request, parts)
        try:
            with content:
                prepared = _expect(reply, Prepared)
                inputs = [
                    msgspec.structs.replace(item, data=content.read(size))
                    for item, size in zip(prepared.inputs, prepared.sizes, strict=True)
                ]
        except EOFError as error:
            process.close()
            raise ParameterError(request.where, f"cannot be decoded: {error}") from None
        finally:
            self.put_back(process)
        return PreparedImage(prepared.text, inputs, prepared.is_video)

    def _exchange(
        self,
        request: ReadImage | ReadVideo | OpenAudio | ReadDocument,
        parts: Sequence[bytes | memoryview],
    ) -> tuple[_Process, Reply, SharedContent]:
        process = self._take_idle() or self._start(request.where)
        num_tries = 1
        while True:
            try:
                return process, *process.exchange(request, parts)
            except _Lost as error:
                process.close()
                if not error.may_be_innocent or num_tries == MAX_TRIES:
                    raise ParameterError(request.where, str(error)) from None
                process = self._start(request.where)
                num_tries += 1
            except BaseException:
                process.close()
                raise

    def _take_idle(self) -> _Process | None:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_reusable:
                    return process
                process.close()
        return None

    def _start(self, where: str) -> _Process:
        try:
            return _Process(self._processes.spawn(), self._limits)
        except OSError as error:
            raise UnavailableError(
                f"cannot start a process to decode {where}: {error.strerror or error}; retry later"
            ) from None


def _describe(source: str | bytes | Sequence[str], parts: Sequence[bytes]) -> Source:
    is_one = isinstance(source, str | bytes)
    return Source([len(part) for part in parts], not isinstance(source, bytes), not is_one)


def _bytes(source: str | bytes) -> bytes:
    return source.encode(errors="surrogatepass") if isinstance(source, str) else source


def _expect(reply: Reply, kind: type[Any]) -> Any:
    if isinstance(reply, Refused):
        raise ParameterError(reply.param, reply.problem)
    if not isinstance(reply, kind):
        raise TypeError(f"a media process sent {type(reply).__name__}, not {kind.__name__}")
    return reply
