"""Reads the processors of Qwen-VL and GLM-4.1V."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.vision.grid import GridVisionSpec
from ....protocol.checkpoint.vision.read import has_vision, vision_spec
from ....protocol.config.images import ResizeProcessor
from ....protocol.config.videos import VideoProcessor
from .fields import BICUBIC, CLIP_VALUES, pixel_values
from .source import ProcessorSource

_MAX_PIXELS: Final = 1 << 26
_MAX_FRAMES: Final = 1024


def resize(source: ProcessorSource, vision: GridVisionSpec, token_id: int) -> ResizeProcessor:
    """Return the processor of Qwen2-VL and its successors."""
    fields = source.fields
    check_patches(fields, vision)
    least, most = pixel_limits(fields, 56 * 56, 28 * 28 * 1280)
    if most < vision.unit**2:
        raise fields.error(f"max_pixels {most} must be at least {vision.unit**2}")
    return ResizeProcessor(
        **CLIP_VALUES | pixel_values(fields, token_id, BICUBIC),
        output_size=vision.output_size * (1 + len(vision.deepstack_layers)),
        num_outputs=most // vision.unit**2,
        unit=vision.unit,
        min_pixels=least,
        max_pixels=most,
    )


def resize_pairs(source: ProcessorSource, vision: GridVisionSpec, token_id: int) -> ResizeProcessor:
    """Return the processor of GLM-4.1V and GLM-4.5V, whose limits count the pixels of every frame of a patch."""
    fields, frames = source.fields, vision.frames_per_patch
    check_patches(fields, vision)
    least, most = pixel_limits(fields, 112 * 112, 28 * 28 * 15000)
    if most < frames * vision.unit**2:
        raise fields.error(f"the largest size {most} must be at least {frames * vision.unit**2}")
    return ResizeProcessor(
        **CLIP_VALUES | pixel_values(fields, token_id, BICUBIC),
        output_size=vision.output_size,
        num_outputs=most // frames // vision.unit**2,
        unit=vision.unit,
        min_pixels=-(-least // frames),
        max_pixels=most // frames,
        grows=True,
    )


def read_video_processor(
    path: Path, config: ConfigFields, text: ConfigFields, overrides: Mapping[str, object]
) -> VideoProcessor | None:
    """Return how the model reads videos; None if it reads none, or without the processor's file.

    Args:
        path: The checkpoint.
        config: Its config.
        text: The text decoder's part of it.
        overrides: Fields that replace those of the processor.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    is_qwen = config.text("model_type", "").startswith("qwen")
    if not (is_qwen and has_vision(config) and path.is_dir()):
        return None
    if config.get("video_token_id") is None:
        return None
    vision = vision_spec(config, text.integer("hidden_size"))
    found = _video_fields(path)
    if not isinstance(vision, GridVisionSpec) or found is None:
        return None
    fields = found.with_values(dict(overrides))
    check_patches(fields, vision)
    has_times = config.text("model_type").startswith("qwen3")
    unit, highest = vision.unit, text.integer("vocab_size") - 1
    least, most = pixel_limits(fields, 128 * unit**2, 768 * unit**2)
    if most < unit**2:
        raise fields.error(f"max_pixels {most} must be at least {unit**2}")
    common = CLIP_VALUES | pixel_values(
        fields, config.integer("video_token_id", minimum=0, maximum=highest), BICUBIC
    )
    steps = 0.0
    if config.text("model_type") == "qwen2_5_vl":
        steps = config.required_section("vision_config").positive("tokens_per_second", 4.0)
    if has_times:
        common |= {
            f"{name}_token_id": config.integer(
                f"vision_{name}_token_id", default, minimum=0, maximum=highest
            )
            for name, default in (("start", 151652), ("end", 151653))
        }
    return VideoProcessor(
        **common,
        unit=unit,
        frames_per_patch=vision.frames_per_patch,
        min_pixels=least,
        max_pixels=most,
        limits_whole=has_times,
        rounds_indices=has_times,
        steps_per_second=steps,
        fps=fields.positive("fps", 2.0),
        min_frames=fields.integer("min_frames", 4),
        max_frames=fields.integer("max_frames", 768, maximum=_MAX_FRAMES),
    )


def _video_fields(path: Path) -> ConfigFields | None:
    """Return the fields of the video processor, which are those of the image processor in older checkpoints."""
    for name, section in (
        ("video_preprocessor_config.json", None),
        ("processor_config.json", "video_processor"),
        ("preprocessor_config.json", None),
    ):
        if (path / name).is_file():
            fields = ConfigFields.read(path / name)
            found = fields if section is None else fields.section(section)
            if found is not None:
                return found
    return None


def check_patches(fields: ConfigFields, vision: GridVisionSpec) -> None:
    """Raise CheckpointError unless the processor makes patches of the size that the tower reads."""
    for name, size in (
        ("patch_size", vision.patch_size),
        ("merge_size", vision.merge_size),
        ("temporal_patch_size", vision.frames_per_patch),
    ):
        if fields.integer(name, size) != size:
            raise fields.wrong(name, f"{size}, as in vision_config", fields.get(name))


def pixel_limits(fields: ConfigFields, least: int, most: int) -> tuple[int, int]:
    """Return the minimum and the maximum number of pixels."""
    size = fields.first_section("size")
    least = size.integer("shortest_edge", least, maximum=_MAX_PIXELS)
    most = size.integer("longest_edge", most)
    least = fields.integer("min_pixels", least, maximum=_MAX_PIXELS)
    return least, max(least, fields.integer("max_pixels", most))
