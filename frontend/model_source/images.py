"""Reads how a checkpoint's images are processed, from the files of transformers' processors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.checkpoint.vision import MAX_SIDE, VisionSpec, has_vision, vision_spec
from ...protocol.config.model import ImageProcessorConfig, TileLayout

logger = logging.getLogger(__name__)

_FILES: Final = ("preprocessor_config.json", "processor_config.json")
_LANCZOS, _BICUBIC = 1, 3
_MAX_TILES: Final = 64
_CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)


def read_image_processor(
    path: Path, config: ConfigFields, text: ConfigFields, overrides: Mapping[str, object]
) -> ImageProcessorConfig | None:
    """Return how the model reads images; None if it reads none, or without the processor's file.

    Args:
        path: The checkpoint.
        config: Its config.
        text: The text decoder's part of it.
        overrides: Fields that replace those of the processor.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    if not has_vision(config) or not path.is_dir():
        return None
    vision = vision_spec(config, text.integer("hidden_size"))
    processor = _read_processor(path)
    if processor is None:
        logger.warning("%s has no %s, so images are refused", path, _FILES[0])
        return None
    token_id = config.integer(
        "image_token_id" if config.get("image_token_id") is not None else "image_token_index",
        minimum=0,
        maximum=text.integer("vocab_size") - 1,
    )
    read = _READERS[config.text("model_type")]
    # InternVL's processor ignores this field of the file.
    processor = processor.with_values({"crop_to_patches": None})
    return read(processor.with_values(dict(overrides)), vision, token_id)


def _read_processor(path: Path) -> ConfigFields | None:
    """Return the fields of the image processor; processors of transformers 5 have them in a section."""
    for name in _FILES:
        if (path / name).is_file():
            fields = ConfigFields.read(path / name)
            found = fields.section("image_processor") or fields
            if found.get("image_processor_type") is not None or name == _FILES[0]:
                return found
    return None


def _grid(fields: ConfigFields, vision: VisionSpec, token_id: int) -> ImageProcessorConfig:
    side = _side(fields.first_section("max_image_size"), "longest_edge", vision)
    size = fields.first_section("size")
    return ImageProcessorConfig(
        **_values(fields, vision, token_id, _LANCZOS),
        side=side,
        layout=TileLayout.GRID,
        longest_edge=size.integer("longest_edge", 4 * side, maximum=MAX_SIDE),
        splits=fields.boolean("do_image_splitting", True),
    )


def _canvas(fields: ConfigFields, vision: VisionSpec, token_id: int) -> ImageProcessorConfig:
    common = _values(fields, vision, token_id, _BICUBIC)
    common.setdefault("mean", _CLIP_MEAN)
    common.setdefault("std", _CLIP_STD)
    min_tiles = fields.integer("min_patches", 1, maximum=_MAX_TILES)
    return ImageProcessorConfig(
        **common,
        side=_side(_sides(fields, "size"), "height", vision),
        layout=TileLayout.CANVAS,
        splits=fields.boolean("crop_to_patches", True),
        min_tiles=min_tiles,
        max_tiles=fields.integer("max_patches", 12, minimum=min_tiles, maximum=_MAX_TILES),
        start="<img>",
        end="</img>",
    )


def _single(fields: ConfigFields, vision: VisionSpec, token_id: int) -> ImageProcessorConfig:
    common = _values(fields, vision, token_id, _BICUBIC)
    size, crop = _sides(fields, "size"), _sides(fields, "crop_size")
    if vision.has_class_token:
        common.setdefault("mean", _CLIP_MEAN)
        common.setdefault("std", _CLIP_STD)
    if size.get("shortest_edge") is None:
        side = _side(size, "height", vision)
        return ImageProcessorConfig(**common, side=side, layout=TileLayout.SQUARE)
    side = _side(crop, "height", vision)
    return ImageProcessorConfig(
        **common,
        side=side,
        layout=TileLayout.CROP,
        shortest_edge=size.integer("shortest_edge", minimum=side, maximum=MAX_SIDE),
    )


def _values(
    fields: ConfigFields, vision: VisionSpec, token_id: int, resample: int
) -> dict[str, Any]:
    """Return what all processors have in common."""
    values: dict[str, Any] = {
        "token_id": token_id,
        "num_outputs": vision.num_outputs,
        "resample": fields.integer("resample", resample, minimum=0, maximum=5),
        "scale": fields.positive("rescale_factor", 1 / 255),
    }
    if not fields.boolean("do_rescale", True):
        values["scale"] = 1.0
    if not fields.boolean("do_normalize", True):
        return values | {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    for name, read in (("mean", _number), ("std", _positive)):
        found = fields.get(f"image_{name}")
        if found is not None:
            values[name] = _channels(fields, f"image_{name}", found, read)
    return values


def _sides(fields: ConfigFields, name: str) -> ConfigFields:
    """Return a size, which old files have as a number: of the shorter side, or of both sides of the middle."""
    size = fields.get(name)
    if isinstance(size, int):
        names = ("shortest_edge",) if name == "size" else ("height", "width")
        return ConfigFields(dict.fromkeys(names, size), fields.path, f"{name}.")
    return fields.first_section(name)


def _side(fields: ConfigFields, name: str, vision: VisionSpec) -> int:
    """Return the side of a tile, which must be that of the images that the tower reads."""
    side = fields.integer(name, vision.image_size)
    if side != vision.image_size:
        raise fields.wrong(name, f"{vision.image_size}, which is vision_config.image_size", side)
    return side


def _channels(
    fields: ConfigFields, name: str, value: Any, is_valid: Callable[[Any], bool]
) -> tuple[float, float, float]:
    numbers = value if isinstance(value, list) else [value] * 3
    if len(numbers) != 3 or not all(map(is_valid, numbers)):
        raise fields.wrong(name, "three numbers", value)
    first, second, third = map(float, numbers)
    return first, second, third


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e6


def _positive(value: Any) -> bool:
    return _number(value) and value > 1e-6


_READERS: Final = {
    "idefics3": _grid,
    "internvl": _canvas,
    "llava": _single,
    "smolvlm": _grid,
}
