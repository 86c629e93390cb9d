"""Read the fields that all image processors share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.vision.convolutional.fastvit import FastVitSpec
from ....protocol.checkpoint.vision.deepseek import SamVisionSpec
from ....protocol.checkpoint.vision.llama import TilesVisionSpec
from ....protocol.checkpoint.vision.spec import VisionSpec

LANCZOS: Final = 1
BILINEAR: Final = 2
BICUBIC: Final = 3
IMAGENET_VALUES: Final = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF_VALUES: Final = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
CLIP_VALUES: Final = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}


def pixel_values(fields: ConfigFields, token_id: int, resample: int) -> dict[str, Any]:
    """Return the settings that image and video processors share, as keyword arguments."""
    values: dict[str, Any] = {
        "token_id": token_id,
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


def sides(fields: ConfigFields, name: str) -> ConfigFields:
    """Return a size. Old files give a number, for the shorter side (resizing) or for both sides (cropping)."""
    size = fields.get(name)
    if isinstance(size, int):
        names = ("shortest_edge",) if name == "size" else ("height", "width")
        return ConfigFields(dict.fromkeys(names, size), fields.path, f"{name}.")
    return fields.first_section(name)


def side_of_tile(
    fields: ConfigFields,
    name: str,
    vision: VisionSpec | TilesVisionSpec | FastVitSpec | SamVisionSpec,
) -> int:
    """Return the side of a tile in pixels, which must equal the image size of the vision tower."""
    side = fields.integer(name, vision.image_size)
    if side != vision.image_size:
        raise fields.wrong(name, f"{vision.image_size}, as in the vision tower", side)
    if name == "height":
        fields.require("width", side, ", as height")
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
