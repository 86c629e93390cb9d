"""The way in which a request wants its videos to be read, in the fields of vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ....protocol.errors import ParameterError
from ...http.shown_values import echo

_PROCESSOR: Final = "mm_processor_kwargs"
_READER: Final = "media_io_kwargs"
_MAX_FPS: Final = 1000.0
_MAX_FRAMES: Final = 1024


class MediaOptions(NamedTuple):
    """The choices of a request.

    Attributes:
        reads_sound: True if the sound of videos is read, too. None for the server's default.
        fps: The number of frames per second for videos that give none, or None.
        num_frames: The number of frames of files for videos that give none, or None.
    """

    reads_sound: bool | None = None
    fps: float | None = None
    num_frames: int | None = None


DEFAULT_OPTIONS: Final = MediaOptions()


def parse_media_options(
    processor: Mapping[str, Any] | None,
    reader: Mapping[str, Any] | None = None,
    reads_sound: bool | None = None,
) -> MediaOptions:
    """Return the choices of a request.

    Args:
        processor: vLLM's `mm_processor_kwargs`.
        reader: vLLM's `media_io_kwargs`.
        reads_sound: SGLang's `use_audio_in_video`.

    Raises:
        ParameterError: A field is unknown or invalid.
    """
    given, kinds = dict(processor or {}), dict(reader or {})
    sound = given.pop("use_audio_in_video", None)
    if sound is not None and not isinstance(sound, bool):
        raise ParameterError(
            f"{_PROCESSOR}.use_audio_in_video", f"must be true or false, got {echo(sound)}"
        )
    if (chooses := given.pop("do_sample_frames", None)) not in (None, True):
        raise ParameterError(
            f"{_PROCESSOR}.do_sample_frames",
            f"must be true, because frames of files are always chosen; got {echo(chooses)}",
        )
    video = kinds.pop("video", None)
    _verify_known(kinds, _READER, "video")
    if video is not None and not isinstance(video, dict):
        raise ParameterError(f"{_READER}.video", f"must be an object, got {echo(video)}")
    video = dict(video or {})
    fps, num_frames = (
        _number(given.pop(name, None), f"{_PROCESSOR}.{name}")
        or _number(video.pop(name, None), f"{_READER}.video.{name}")
        for name in ("fps", "num_frames")
    )
    _verify_known(given, _PROCESSOR, "use_audio_in_video, fps, num_frames and do_sample_frames")
    _verify_known(video, f"{_READER}.video", "fps and num_frames")
    return MediaOptions(reads_sound if sound is None else sound, fps, num_frames)


def _number(value: Any, where: str) -> Any:
    """Return a rate or a number of frames; None for -1, which leaves it to the model."""
    if value is None or value == -1:
        return None
    is_rate = where.endswith("fps")
    kinds, most = ((int, float), _MAX_FPS) if is_rate else ((int,), _MAX_FRAMES)
    if type(value) not in kinds or not 0 < value <= most:
        name = "a number" if is_rate else "an integer"
        raise ParameterError(
            where, f"must be {name} above 0 and at most {most:g}, got {echo(value)}"
        )
    return value


def _verify_known(rest: Mapping[str, Any], where: str, known: str) -> None:
    """Raise ParameterError if there are fields left that are not known."""
    for name in rest:
        raise ParameterError(where, f"may have only {known}, got {echo(name)}")
