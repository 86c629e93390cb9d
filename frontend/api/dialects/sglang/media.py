"""Images, videos and audio clips in SGLang's requests, beside a text that marks their places."""

from __future__ import annotations

from typing import Any, Final

from ....http.errors import bad_request, renaming
from ....media.sources.media_options import (
    DEFAULT_OPTIONS,
    MediaOptions,
    parse_media_options,
    sglang_fields,
)
from ...inputs.given_media import GivenMedia, url_part
from ...logprobs import Json
from ...schema.sglang import SglangGenerateRequest, SglangInput

_KINDS: Final = ("image", "video", "audio")
MEDIA_FIELDS: Final = tuple(f"{kind}_data" for kind in _KINDS)

_PATCHES: Final = {
    "image_max_dynamic_patch": "images_config",
    "video_max_dynamic_patch": "video_config",
}
"""Fields that set `max_dynamic_patch` for one kind of media, and the object with the settings of this kind."""


def given_media(body: SglangInput, place: str = "") -> GivenMedia | None:
    """Return the media of a body with one prompt, or with the same media for each prompt; None if there are none.

    `place` is the end of the fields' names in errors. SGLang's templates mark the places by `<image>`, `<video>` and
    `<audio>`.

    Raises:
        APIError: A file has the wrong type, or a setting is invalid (400).
    """
    parts: list[Json] = []
    names: list[str] = []
    markers: list[str] = []
    for kind, field in zip(_KINDS, MEDIA_FIELDS, strict=True):
        for item, where in _items(getattr(body, field), field + place):
            part, name = url_part(item, kind, where)
            parts.append(part)
            names.append(name)
            markers.append(f"<{kind}>")
    if not parts:
        return None
    param = next(field for field in MEDIA_FIELDS if getattr(body, field)) + place
    options = DEFAULT_OPTIONS
    if isinstance(body, SglangGenerateRequest):
        options = _options(body)
    return GivenMedia(param, parts, names, markers, options)


def media_of_each(body: SglangInput, count: int | None) -> list[GivenMedia | None]:
    """Return the media of each of `count` prompts; None for one prompt that is not in a list.

    Raises:
        APIError: A field has too few or too many values, or is invalid (400).
    """
    if count is None:
        return [given_media(body)]
    lists = {
        field: values
        for field in MEDIA_FIELDS
        if isinstance(values := getattr(body, field), list) and values
    }
    for field, values in lists.items():
        if len(values) != count:
            raise bad_request(
                field, f"must have one value for each of the {count} prompts, got {len(values)}"
            )
    if not lists:
        return [given_media(body)] * count
    others = {field: getattr(body, field) for field in MEDIA_FIELDS if field not in lists}
    found = []
    for i in range(count):
        own = {field: values[i] for field, values in lists.items()}
        found.append(given_media(SglangInput(**others, **own), f"[{i}]"))
    return found


def _items(value: Any, where: str) -> list[tuple[Any, str]]:
    """Return the files in a field with the media of one prompt, and their names."""
    if not isinstance(value, list):
        return [] if value is None else [(value, where)]
    if len(value) == 1 and isinstance(value[0], list):
        value, where = value[0], f"{where}[0]"
    return [(item, f"{where}[{i}]") for i, item in enumerate(value) if item is not None]


def _options(body: SglangGenerateRequest) -> MediaOptions:
    """Return the choices of a request. Raise APIError 400 if one is invalid."""
    fields = sglang_fields(body)
    for name, config in _PATCHES.items():
        most = getattr(body, name)
        if most is not None and isinstance(given := fields.get(config, {}), dict):
            fields[config] = given | {"max_dynamic_patch": most}
    with renaming(str):
        return parse_media_options(body.mm_processor_kwargs, None, fields)
