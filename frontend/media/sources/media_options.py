"""The way in which a request wants its images and videos to be read, in the fields of vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ....protocol.errors import ParameterError
from ...http.shown_values import echo
from .processor_fields import KNOWN_FIELDS, ProcessorField, take_fields

_PROCESSOR: Final = "mm_processor_kwargs"
_READER: Final = "media_io_kwargs"
_KINDS: Final = ("images_kwargs", "videos_kwargs")
_CONFIGS: Final = ("images_config", "video_config")
_CHOICES: Final = ("fps", "num_frames")
SGLANG_FIELDS: Final = ("use_audio_in_video", "max_dynamic_patch", "min_dynamic_patch", *_CONFIGS)
"""The fields of SGLang that choose how images and videos are read."""

_MAX_FPS: Final = 1000.0
_MAX_FRAMES: Final = 1024


class MediaOptions(NamedTuple):
    """The choices of a request.

    Attributes:
        reads_sound: True if the sound of videos is read, too. None for the server's default.
        fps: The number of frames per second for videos that give none, or None.
        num_frames: The number of frames of files for videos that give none, or None.
        images: The fields for the processor of images.
        videos: The fields for the processor of videos.
    """

    reads_sound: bool | None = None
    fps: float | None = None
    num_frames: int | None = None
    images: tuple[ProcessorField, ...] = ()
    videos: tuple[ProcessorField, ...] = ()


DEFAULT_OPTIONS: Final = MediaOptions()


def parse_media_options(
    processor: Mapping[str, Any] | None,
    reader: Mapping[str, Any] | None = None,
    sglang: Mapping[str, Any] | None = None,
) -> MediaOptions:
    """Return the choices of a request.

    Args:
        processor: vLLM's `mm_processor_kwargs`.
        reader: vLLM's `media_io_kwargs`.
        sglang: SGLang's fields, of `SGLANG_FIELDS`.

    Raises:
        ParameterError: A field is unknown or invalid.
    """
    if not (processor or reader or sglang):
        return DEFAULT_OPTIONS
    others = sglang or {}
    given, kinds = dict(processor or {}), dict(reader or {})
    sound = given.pop("use_audio_in_video", None)
    if sound is not None and not isinstance(sound, bool):
        raise ParameterError(
            f"{_PROCESSOR}.use_audio_in_video", f"must be true or false, got {echo(sound)}"
        )
    images = take_fields(dict(pair for pair in others.items() if pair[0] in KNOWN_FIELDS), "")
    images += take_fields(given, _PROCESSOR)
    videos = images
    _verify_sampling(given, _PROCESSOR)
    own = [
        *(
            (f"{_PROCESSOR}.{kind}", _object(given.pop(kind, None), f"{_PROCESSOR}.{kind}"))
            for kind in _KINDS
        ),
        *((name, _object(others.get(name), name)) for name in _CONFIGS),
    ]
    for where, values in own[::2]:
        images += take_fields(values, where)
        _verify_known(values, where, "the settings of the model's processor")
    for where, values in own[1::2]:
        videos += take_fields(values, where)
        _verify_sampling(values, where)
    reading = f"{_READER}.video", _object(kinds.pop("video", None), f"{_READER}.video")
    _verify_known(kinds, _READER, "video")
    # The first one counts.
    sources = [(_PROCESSOR, given), *own[1::2], reading]
    chosen: dict[str, Any] = {}
    for where, values in sources:
        for name in _CHOICES:
            number = _number(values.pop(name, None), f"{where}.{name}")
            if number is not None and chosen.get(name) is None:
                chosen[name] = number
    _verify_known(
        given,
        _PROCESSOR,
        "use_audio_in_video, fps, num_frames, do_sample_frames, images_kwargs, videos_kwargs and the settings of "
        "the model's processor",
    )
    for where, values in own[1::2]:
        _verify_known(values, where, "fps, num_frames and the settings of the model's processor")
    _verify_known(reading[1], reading[0], "fps and num_frames")
    if sound is None:
        sound = others.get("use_audio_in_video")
    return MediaOptions(sound, chosen.get("fps"), chosen.get("num_frames"), images, videos)


def sglang_fields(request: object) -> dict[str, Any]:
    """Return the fields of SGLang that a request has, for `parse_media_options`."""
    values = {name: getattr(request, name, None) for name in SGLANG_FIELDS}
    return {name: value for name, value in values.items() if value is not None}


def _object(value: Any, where: str) -> dict[str, Any]:
    """Return a copy of an object. Raise ParameterError for another value than None."""
    if value is not None and not isinstance(value, dict):
        raise ParameterError(where, f"must be an object, got {echo(value)}")
    return dict(value or {})


def _verify_sampling(given: dict[str, Any], where: str) -> None:
    """Remove `do_sample_frames`. Raise ParameterError if it is false."""
    if (chooses := given.pop("do_sample_frames", None)) not in (None, True):
        raise ParameterError(
            f"{where}.do_sample_frames",
            f"must be true, because frames of files are always chosen; got {echo(chooses)}",
        )


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
