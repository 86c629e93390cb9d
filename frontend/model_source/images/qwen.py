"""Reads the processors of Qwen-VL and GLM-4.1V."""

from __future__ import annotations

from typing import Final

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.vision.grid import GridVisionSpec
from ....protocol.config.images import ResizeProcessor
from .fields import BICUBIC, CLIP_VALUES, pixel_values
from .source import ProcessorSource

_MAX_PIXELS: Final = 1 << 26


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
