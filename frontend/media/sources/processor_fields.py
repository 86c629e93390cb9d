"""The fields of a request that replace settings of the model's image and video processors, such as `max_pixels`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from ....protocol.config.images.details import (
    PanScanProcessor,
    SlicesProcessor,
    ThumbnailProcessor,
    ViewsProcessor,
)
from ....protocol.config.images.processors import AnyImageProcessor
from ....protocol.config.images.sized import (
    BudgetProcessor,
    CornerProcessor,
    QuartersProcessor,
    ResizeProcessor,
)
from ....protocol.config.images.tiles import (
    BandsProcessor,
    CanvasProcessor,
    CoverProcessor,
    CropsProcessor,
    GridProcessor,
    OverlapsProcessor,
    PagesProcessor,
    TilesProcessor,
)
from ....protocol.config.videos import AnyVideoProcessor, FrameProcessor, VideoProcessor
from ....protocol.errors import ParameterError
from ...http.shown_values import echo

_T = TypeVar("_T", bound=msgspec.Struct)

_PIXELS: Final = {
    "min_pixels": "min_pixels",
    "max_pixels": "max_pixels",
    "size.shortest_edge": "min_pixels",
    "size.longest_edge": "max_pixels",
}
_MOST_TILES: Final = {"max_dynamic_patch": "max_tiles", "max_patches": "max_tiles"}
_TILES: Final = {"min_dynamic_patch": "min_tiles", "min_patches": "min_tiles", **_MOST_TILES}
_SPLITS: Final = {"crop_to_patches": "splits", "dynamic_image_size": "splits"}
_SPLITS_IMAGES: Final = {"do_image_splitting": "splits"}

_IMAGES: Final[dict[type[Any], Mapping[str, str]]] = {
    BandsProcessor: {"num_crops": "max_tiles"},
    BudgetProcessor: {"max_soft_tokens": "num_outputs"},
    CanvasProcessor: {**_TILES, **_SPLITS},
    CornerProcessor: {"min_image_tokens": "min_outputs", "max_image_tokens": "num_outputs"},
    CoverProcessor: {**_TILES, **_SPLITS},
    CropsProcessor: {"dynamic_hd": "max_tiles"},
    GridProcessor: {"size.longest_edge": "longest_edge", **_SPLITS_IMAGES},
    OverlapsProcessor: {"max_crops": "max_tiles"},
    PagesProcessor: _TILES,
    PanScanProcessor: {
        "do_pan_and_scan": "scans",
        "pan_and_scan_max_num_crops": "max_crops",
        "pan_and_scan_min_crop_size": "min_crop_side",
    },
    QuartersProcessor: _SPLITS_IMAGES,
    ResizeProcessor: _PIXELS,
    SlicesProcessor: {"max_slice_nums": "max_slices"},
    ThumbnailProcessor: {
        "min_image_tokens": "min_outputs",
        "max_image_tokens": "max_outputs",
        "min_tiles": "min_tiles",
        "max_tiles": "max_tiles",
    },
    TilesProcessor: _MOST_TILES,
    ViewsProcessor: {**_TILES, **_SPLITS},
}
"""Fields of requests, by the image processor whose attributes they replace."""

_VIDEOS: Final[dict[type[Any], Mapping[str, str]]] = {
    FrameProcessor: {"min_frames": "min_frames", "max_frames": "max_frames"},
    VideoProcessor: {**_PIXELS, "min_frames": "min_frames", "max_frames": "max_frames"},
}

_MOST_OF: Final = {
    "min_pixels": "max_pixels",
    "min_tiles": "max_tiles",
    "min_outputs": "max_outputs",
    "min_frames": "max_frames",
}
"""Attributes that are minima, and the attribute that is the maximum."""

_SIZE: Final = "size"
KNOWN_FIELDS: Final = frozenset(
    name for table in (_IMAGES, _VIDEOS) for names in table.values() for name in names
)
"""The names of the fields; those of the object `size` begin with `size.`."""


LIMITS_OF_PARTS: Final = ("min_pixels", "max_pixels", "min_dynamic_patch", "max_dynamic_patch")
"""Fields of a part, or of the object with its URL, that limit the size of an image or a video."""


class ProcessorField(msgspec.Struct, frozen=True, array_like=True):
    """A field of a request, with its name in errors, that replaces a setting of a processor."""

    where: str
    name: str
    value: int | bool


def take_fields(given: dict[str, Any], where: str) -> tuple[ProcessorField, ...]:
    """Remove the fields of processors from an object of a request, and return them.

    Raises:
        ParameterError: A value is neither an integer above 0 nor a boolean.
    """
    values = {name: given.pop(name) for name in list(given) if name in KNOWN_FIELDS}
    if isinstance(size := given.get(_SIZE), Mapping):
        del given[_SIZE]
        for name, value in size.items():
            if f"{_SIZE}.{name}" not in KNOWN_FIELDS:
                raise ParameterError(
                    f"{where}.{_SIZE}",
                    f"may have only shortest_edge and longest_edge, got {echo(name)}",
                )
            values[f"{_SIZE}.{name}"] = value
    found: list[ProcessorField] = []
    for name, value in values.items():
        if value is None:
            continue
        param = f"{where}.{name}" if where else name
        if not isinstance(value, int) or (not isinstance(value, bool) and value < 1):
            raise ParameterError(
                param, f"must be an integer above 0, or true or false; got {echo(value)}"
            )
        found.append(ProcessorField(param, name, value))
    return tuple(found)


def verify_fields(
    fields: Sequence[ProcessorField],
    images: AnyImageProcessor | None,
    videos: AnyVideoProcessor | None,
) -> None:
    """Raise ParameterError if neither processor of the model has a field."""
    known = sorted({*_IMAGES.get(type(images), {}), *_VIDEOS.get(type(videos), {})})
    for field in fields:
        if field.name not in known:
            raise ParameterError(
                field.where,
                f"is no setting of this model's processor, which has {', '.join(known) or 'none'}; "
                f"got {echo(field.value)}",
            )


def with_image_fields(
    config: AnyImageProcessor, fields: Sequence[ProcessorField]
) -> AnyImageProcessor:
    """Return an image processor with the fields of a request.

    Raises:
        ParameterError: A value is outside the limits of the server.
    """
    scale = config.counted_frames if isinstance(config, ResizeProcessor) else 1
    return _replace(config, _IMAGES.get(type(config), {}), fields, scale)


def with_video_fields(
    config: AnyVideoProcessor, fields: Sequence[ProcessorField]
) -> AnyVideoProcessor:
    """Return a video processor with the fields of a request. See `with_image_fields`."""
    return _replace(config, _VIDEOS[type(config)], fields, 1)


def _replace(
    config: _T, names: Mapping[str, str], fields: Sequence[ProcessorField], scale: int
) -> _T:
    changed: dict[str, Any] = {}
    given: dict[str, ProcessorField] = {}
    for field in fields:
        if (attribute := names.get(field.name)) is None:
            continue
        if isinstance(getattr(config, attribute), bool) != isinstance(field.value, bool):
            kind = "true or false" if isinstance(getattr(config, attribute), bool) else "an integer"
            raise ParameterError(field.where, f"must be {kind}, got {echo(field.value)}")
        given[attribute] = field
        is_pixels = attribute.endswith("_pixels")
        changed[attribute] = max(1, field.value // scale) if is_pixels else field.value
    for attribute, field in given.items():
        if isinstance(field.value, bool):
            continue
        limit, reason = getattr(config, attribute), "the server's own; see --mm-processor-kwargs"
        if most := _most_of(config, attribute):
            limit = changed.get(most, getattr(config, most))
            reason = f"the maximum in {given[most].where}" if most in given else reason
        if changed[attribute] > limit:
            limit *= scale if attribute.endswith("_pixels") else 1
            raise ParameterError(
                field.where, f"must be at most {limit}, {reason}; got {field.value}"
            )
        if not attribute.endswith("_pixels"):
            _verify_least(config, attribute, field, changed)
    return msgspec.structs.replace(config, **changed) if changed else config


def _verify_least(
    config: msgspec.Struct, attribute: str, field: ProcessorField, changed: Mapping[str, Any]
) -> None:
    """Raise ParameterError if a maximum is below the minimum that the server has."""
    for minimum in _MOST_OF:
        is_bound = hasattr(config, minimum) and _most_of(config, minimum) == attribute
        if is_bound and minimum not in changed:
            least = getattr(config, minimum)
            if field.value < least:
                raise ParameterError(
                    field.where, f"must be at least {least}, the server's own; got {field.value}"
                )


def _most_of(config: msgspec.Struct, minimum: str) -> str:
    """Return the attribute that is the maximum of an attribute that is a minimum, otherwise ""."""
    most = _MOST_OF.get(minimum, "")
    return most if not most or hasattr(config, most) else "num_outputs"
