"""The pool of processes that decode media for a frontend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from ....protocol.arrays import Float32Array
from ....protocol.errors import ParameterError
from ....protocol.isolation.channel import SharedContent
from ....protocol.isolation.pool import Lost, PooledProcess, ProcessPool
from ....protocol.isolation.processes import MAX_TRIES
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
    Setup,
    Source,
    decode_reply,
)

_MAX_SKIPPED: Final = 1 << 20
"""Maximum samples, already returned by an earlier process, that are skipped at once."""

DEFAULT_LIMITS: Final = DecoderLimits()

_GRACE_S: Final = 5.0

Decoder: TypeAlias = PooledProcess[Reply]
"""A process that decodes files one after another."""


class IsolatedAudio:
    """An audio clip that is decoded by its own process, until its end or until it is closed.

    If the process ends and the clip may not be the reason, another one decodes the clip again from its beginning.
    """

    def __init__(self, pool: MediaProcesses, data: bytes, opening: OpenAudio) -> None:
        self._pool, self._data, self._opening = pool, data, opening
        self._process: Decoder | None = pool.open_process(data, opening)
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
            except Lost as error:
                self.close()
                self._num_losses += 1
                if not error.may_be_innocent or self._num_losses == MAX_TRIES:
                    raise self._pool.refuse(self._opening.where, error) from None
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

    def _read_from(self, process: Decoder, num_samples: int) -> Float32Array:
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

    def _decode(self, process: Decoder, num_samples: int) -> Float32Array:
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


class MediaProcesses(ProcessPool[Reply]):
    """A pool of processes that decode media. It is thread-safe.

    A file that crashes its process, or takes too long or too much memory, fails only its own request.

    Args:
        reader: The processor of the model's images; None if it reads only audio clips.
        limits: Limits on the time and memory of decoding a file.
    """

    def __init__(
        self, reader: ReaderConfig | None = None, limits: DecoderLimits = DEFAULT_LIMITS
    ) -> None:
        self._limits = limits
        setup = msgspec.json.encode(Setup(reader, limits)).decode()
        super().__init__(
            f"{__package__}.decoder_process",
            lambda: [setup],
            decode_reply,
            # Normally the kernel ends the process before this limit.
            limits.wall_s + _GRACE_S,
            MAX_PROCESSES,
        )

    def read_image(
        self,
        source: str | bytes,
        where: str,
        num_images: int,
        fields: tuple[ProcessorField, ...] = (),
        header: str = "",
    ) -> PreparedImage:
        """Return one of a prompt's images, preprocessed.

        Args:
            source: A data URL, or the content of a file.
            where: The name of the field in errors.
            num_images: The number of the prompt's images.
            fields: The fields of the request, which replace settings of the processor.
            header: The text that is drawn above the image.

        Raises:
            ParameterError: The image cannot be read, or a field is outside the server's limits.
        """
        parts = [_bytes(source)]
        request = ReadImage(where, _describe(source, parts), num_images, fields, header)
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
        with self._exchanged(request, [data]) as (reply, content):
            return content.read(_expect(reply, DocumentText).size).decode()

    def open_audio(self, data: bytes, opening: OpenAudio) -> IsolatedAudio:
        """Return an audio clip, which occupies a process until it is closed.

        Raises:
            ParameterError: The clip cannot be read, or is too long.
        """
        return IsolatedAudio(self, data, msgspec.structs.replace(opening, size=len(data)))

    def open_process(self, data: bytes, opening: OpenAudio) -> Decoder:
        """Return a process that has opened an audio clip.

        Raises:
            ParameterError: The clip cannot be read, or is too long.
        """
        try:
            process, reply, content = self.occupy(opening.where, opening, [data])
        except Lost as error:
            raise self.refuse(opening.where, error) from None
        content.close()
        try:
            _expect(reply, Opened)
        except BaseException:
            self.put_back(process)
            raise
        return process

    def _prepare(self, request: ReadImage | ReadVideo, parts: list[bytes]) -> PreparedImage:
        with self._exchanged(request, parts) as (reply, content):
            prepared = _expect(reply, Prepared)
            inputs = [
                msgspec.structs.replace(item, data=content.read(size))
                for item, size in zip(prepared.inputs, prepared.sizes, strict=True)
            ]
        return PreparedImage(prepared.text, inputs, prepared.is_video)

    @contextlib.contextmanager
    def _exchanged(
        self, request: ReadImage | ReadVideo | ReadDocument, parts: Sequence[bytes]
    ) -> Iterator[tuple[Reply, SharedContent]]:
        try:
            with self.exchange(request.where, request, parts) as exchanged:
                yield exchanged
        except Lost as error:
            raise self.refuse(request.where, error) from None
        except EOFError as error:
            raise ParameterError(request.where, f"cannot be decoded: {error}") from None

    def refuse(self, where: str, error: Lost) -> ParameterError:
        """Return the error for a file whose process ended."""
        return ParameterError(where, self._limits.describe_exit(error.signal))


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
