"""Read frames of MP4, WebM and Matroska files with PyAV. The files come from clients and are untrusted."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeAlias

from PIL import Image

from ...protocol.errors import ParameterError

MAX_FRAME_PIXELS: Final = 1 << 24
"""Maximum pixels of a frame."""

MAX_SECONDS: Final = 3600
"""Maximum length of a file in seconds."""

MAX_FRAMES: Final = 60 * MAX_SECONDS
"""Maximum frames of a file."""

_CODECS: Final = {"h264", "hevc", "libdav1d", "av1", "vp8", "vp9", "mpeg4"}
_PROBE_BYTES: Final = 1 << 20

CheckTime: TypeAlias = Callable[[], None]
"""Function that raises `ParameterError` if decoding has taken too long."""


class VideoTrack(NamedTuple):
    """The number, rate (per second) and size of a file's frames."""

    num_frames: int
    fps: float
    width: int
    height: int


class _Packets(NamedTuple):
    """Packets in decoding order, and the times of the frames in display order."""

    packets: list[Any]
    times: list[int]

    def groups(self) -> Iterator[list[Any]]:
        """Return the packets from each key frame to the next one."""
        group: list[Any] = []
        for packet in self.packets:
            if packet.is_keyframe and group:
                yield group
                group = []
            group.append(packet)
        if group:
            yield group


def container_format(data: bytes) -> str | None:
    """Return FFmpeg's name for a file's format; None if it is neither MP4 nor Matroska (which includes WebM)."""
    if data[4:8] == b"ftyp":
        return "mp4"
    return "matroska" if data.startswith(b"\x1a\x45\xdf\xa3") else None


def read_container(
    data: bytes,
    where: str,
    choose: Callable[[VideoTrack], Sequence[int]],
    convert: Callable[[Image.Image], Image.Image],
    check_time: CheckTime,
) -> tuple[VideoTrack, list[Image.Image]]:
    """Return a file's first video track, and some of its frames in RGB.

    Only groups of pictures with chosen frames are decoded. FFmpeg gets only the bytes, so it cannot open other files.

    Args:
        data: A file of a format that `container_format` recognizes.
        where: The name of the field in errors.
        choose: Returns the indices of the frames to read, in ascending order.
        convert: Converts a frame to the image that is returned.
        check_time: Called between frames.

    Raises:
        ParameterError: The file cannot be read, or it is too large or too long.
    """
    av = _import_av(where)
    with _errors(av, where):
        file = io.BytesIO(data)
        options = {"probesize": str(_PROBE_BYTES)}
        with av.open(file, format=container_format(data), options=options) as container:
            if not container.streams.video:
                raise ParameterError(where, "has no video track; send a file with one")
            stream = container.streams.video[0]
            _check_codec(stream, where)
            found = _read_packets(container, stream, where, check_time)
            track = _describe(stream, found.times, where)
            numbers = choose(track)
            decoder = _Decoder(av, stream.codec_context, check_time)
            frames = decoder.decode(found, [found.times[number] for number in numbers], convert)
            if len(frames) < len(set(numbers)):
                raise ParameterError(where, "is damaged: some of its frames cannot be decoded")
            return track, [frames[found.times[number]] for number in numbers]


def _import_av(where: str) -> Any:
    try:
        import av
    except ImportError:
        raise ParameterError(
            where,
            "is a video file, which this server cannot decode without PyAV: install the extra "
            "engine-serve[media], or send frames as data:video/jpeg;base64,…,…",
        ) from None
    return av


@contextmanager
def _errors(av: Any, where: str) -> Iterator[None]:
    """Turn errors of FFmpeg within this context into errors of the request."""
    try:
        yield
    except (ParameterError, MemoryError):
        raise
    # For damaged files, PyAV raises both operating-system errors and its own.
    except (av.FFmpegError, OSError, ValueError, ArithmeticError, LookupError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ParameterError(
            where, f"is not a video that can be read: {reason}; send a valid MP4, WebM or MKV file"
        ) from None


def _check_codec(stream: Any, where: str) -> None:
    codec = stream.codec_context.codec.name if stream.codec_context is not None else "none"
    if codec not in _CODECS:
        raise ParameterError(
            where,
            f"has a video track with the codec {codec}; supported codecs are H.264, H.265, AV1, VP8, VP9 "
            "and MPEG-4",
        )
    _check_size(stream.width, stream.height, where)


def _check_size(width: int, height: int, where: str) -> None:
    if not 0 < width * height <= MAX_FRAME_PIXELS:
        raise ParameterError(
            where,
            f"has frames of {width} x {height} pixels, and at most {MAX_FRAME_PIXELS} are allowed; send "
            "smaller ones",
        )


def _read_packets(container: Any, stream: Any, where: str, check_time: CheckTime) -> _Packets:
    """Return all packets of displayed frames, without decoding them."""
    packets: list[Any] = []
    times: list[int] = []
    for packet in container.demux(stream):
        if not packet.size:
            continue
        packets.append(packet)
        if packet.pts is None:
            raise ParameterError(where, "has frames without a timestamp; send another file")
        if not packet.is_discard:
            times.append(packet.pts)
        if len(packets) > MAX_FRAMES:
            raise ParameterError(where, f"has more than {MAX_FRAMES} frames; send a shorter one")
        if len(packets) % 256 == 0:
            check_time()
    if not times:
        raise ParameterError(where, "has no frames; send a file with at least one")
    return _Packets(packets, sorted(set(times)))


def _describe(stream: Any, times: list[int], where: str) -> VideoTrack:
    num_frames, unit = len(times), float(stream.time_base)
    rate = float(stream.average_rate or 0)
    if not rate > 0:
        seconds = (times[-1] - times[0]) * unit
        rate = (num_frames - 1) / seconds if seconds > 0 else 1.0
    if num_frames / rate > MAX_SECONDS:
        raise ParameterError(
            where,
            f"takes {num_frames / rate:.0f} s, and at most {MAX_SECONDS} s are allowed; send a part of it",
        )
    return VideoTrack(num_frames, rate, stream.width, stream.height)


class _Decoder:
    """Decodes groups of pictures in one thread."""

    def __init__(self, av: Any, context: Any, check_time: CheckTime) -> None:
        self._av, self._context, self._check_time = av, context, check_time
        context.thread_type = "NONE"
        context.thread_count = 1

    def decode(
        self,
        found: _Packets,
        wanted: Sequence[int],
        convert: Callable[[Image.Image], Image.Image],
    ) -> dict[int, Image.Image]:
        """Return the frames with the wanted times; frames that could not be decoded are missing."""
        remaining = set(wanted)
        frames: dict[int, Image.Image] = {}
        groups = list(found.groups())
        is_needed = [any(packet.pts in remaining for packet in group) for group in groups]
        for index, group in enumerate(groups):
            # Frames that are displayed before a key frame but stored after it need the previous group of pictures.
            leads = index + 1 < len(groups) and any(
                packet.pts in remaining and packet.pts < groups[index + 1][0].pts
                for packet in groups[index + 1]
            )
            if not (is_needed[index] or leads):
                continue
            is_last = not (index + 1 < len(groups) and (is_needed[index + 1] or leads))
            for packet in [*group, *[None] * is_last]:
                for frame in self._context.decode(packet):
                    self._check_time()
                    if frame.pts in remaining:
                        remaining.remove(frame.pts)
                        frames[frame.pts] = convert(frame.to_image())
                if not remaining:
                    return frames
            if is_last:
                self._context.flush_buffers()
        return frames
