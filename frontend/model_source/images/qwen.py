"""Read the processors of Qwen-VL, GLM, OCR models and Kimi, which keep the aspect ratio of images."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.vision.convolutional.codes import CodesVisionSpec
from ....protocol.checkpoint.vision.grid import GridVisionSpec
from ....protocol.checkpoint.vision.spec import MAX_SIDE
from ....protocol.config.images.sized import (
    MAX_RATIO,
    CornerProcessor,
    PadProcessor,
    ResizeProcessor,
)
from ....protocol.config.images.tiles import CanvasProcessor
from .fields import BICUBIC, BILINEAR, CLIP_VALUES, sides
from .source import MAX_TILES, ProcessorSource

_MAX_PIXELS: Final = 1 << 26
_KIMI_SIDE: Final = 511
_INKLING_SIDE: Final = 2048
_AS_IN_TOWER: Final = ", as in vision_config"


def resize(source: ProcessorSource, vision: GridVisionSpec) -> ResizeProcessor:
    """Return the processor of Qwen2-VL and its successors."""
    fields = source.fields
    check_patches(fields, vision)
    least, most = pixel_limits(fields, 56 * 56, 28 * 28 * 1280)
    if most < vision.unit**2:
        raise fields.error(f"max_pixels {most} must be at least {vision.unit**2}")
    return ResizeProcessor(
        **CLIP_VALUES | source.pixel_values(BICUBIC),
        output_size=vision.output_size * (1 + len(vision.deepstack_layers)),
        num_outputs=_most_outputs(most, vision.unit),
        unit=vision.unit,
        min_pixels=least,
        max_pixels=most,
    )


def resize_described(source: ProcessorSource, vision: GridVisionSpec) -> ResizeProcessor:
    """Return the processor of MiMo-V2.5, whose limits are in the config of the model."""
    config, area = source.config.first_section("processor_config"), vision.unit**2
    limits = {name: config.get(f"image_{name}") for name in ("min_pixels", "max_pixels")}
    sizes = dict.fromkeys(("patch_size", "merge_size", "temporal_patch_size"))
    own = source.with_values({**sizes, **{k: x for k, x in limits.items() if x is not None}})
    size = {"shortest_edge": 4 * area, "longest_edge": 4096 * area}
    return resize(own.with_defaults(size=size), vision)


def resize_before_lines(source: ProcessorSource, vision: GridVisionSpec) -> ResizeProcessor:
    """Return the processor of Ling 3, in whose prompts a line ends after each image."""
    start, end = "<|vision_start|>", "<|vision_end|>"
    return msgspec.structs.replace(
        resize(source, vision), mark=f"{start}<|image_pad|>{end}", start=start, end=f"{end}\n"
    )


def resize_nested(source: ProcessorSource, vision: GridVisionSpec) -> ResizeProcessor:
    """Return the processor of dots3-note, whose fields are in a section of the file."""
    nested = source.fields.first_section("vision_config")
    sizes = nested.first_section("image_details").first_section("auto")
    for side in ("target_height", "target_width"):
        sizes.require(side, None)
    return resize(source.with_defaults(**nested.with_values(sizes.config).config), vision)


def resize_frames(source: ProcessorSource, vision: GridVisionSpec) -> ResizeProcessor:
    """Return the processor of LLaVA-OneVision 1.5 and 2, whose patches have one frame, also if its file says two."""
    return resize(source.with_values({"temporal_patch_size": vision.frames_per_patch}), vision)


def resize_patches(source: ProcessorSource, vision: GridVisionSpec) -> ResizeProcessor:
    """Return the processor of VideoLLaMA 3, which makes an embedding of each patch."""
    half = [0.5] * 3
    own = source.with_defaults(image_mean=half, image_std=half, merge_size=1, temporal_patch_size=1)
    return resize(own, vision)


def resize_words(source: ProcessorSource, vision: GridVisionSpec) -> ResizeProcessor:
    """Return the processor of Ovis 2.5, whose own code has the limits. There is a mark at both ends of an image."""
    size = {"shortest_edge": 448**2, "longest_edge": 1792**2}
    config = resize_rounded(source.with_values({"size": size, "merge_size": None}), vision)
    half = (0.5,) * 3
    return msgspec.structs.replace(
        config,
        num_outputs=config.num_outputs + 2,
        newlines="ends",
        mark="<image>",
        mean=half,
        std=half,
    )


def resize_codes(source: ProcessorSource, vision: CodesVisionSpec) -> ResizeProcessor:
    """Return the processor of Apertus 1.5, whose prompt has the size of an image and separators of its rows."""
    fields, unit = source.fields, vision.unit
    fields.require("spatial_factor", unit, ", the pixels of a code of the tower", default=16)
    size = fields.first_section("size")
    least = size.integer("min_pixels", 128 * 128)
    most = size.integer("max_pixels", 1400 * 1400, minimum=unit**2)
    return ResizeProcessor(
        **source.pixel_values(BICUBIC),
        output_size=vision.output_size,
        num_outputs=_most_outputs(most, unit),
        unit=unit,
        min_pixels=least,
        max_pixels=most,
        start=source.special_token("boi_token"),
        size_end=source.special_token("image_wrapper_token"),
        row_end=source.special_token("eol_token"),
        end=source.special_token("eoi_token"),
    )


def resize_pairs(source: ProcessorSource, vision: GridVisionSpec) -> ResizeProcessor:
    """Return the processor of GLM-4.1V and GLM-4.5V, whose limits count the pixels of all frames of a patch."""
    fields, frames = source.fields, vision.frames_per_patch
    check_patches(fields, vision)
    least, most = pixel_limits(fields, 112 * 112, 28 * 28 * 15000)
    if most < frames * vision.unit**2:
        raise fields.error(f"the largest size {most} must be at least {frames * vision.unit**2}")
    return ResizeProcessor(
        **CLIP_VALUES | source.pixel_values(BICUBIC),
        output_size=vision.output_size,
        num_outputs=_most_outputs(most // frames, vision.unit),
        unit=vision.unit,
        min_pixels=-(-least // frames),
        max_pixels=most // frames,
        counted_frames=frames,
        grows="floor",
    )


def resize_single(source: ProcessorSource, vision: GridVisionSpec) -> ResizeProcessor:
    """Return the processor of Cosmos 3 Edge, which is that of GLM for patches of one frame."""
    half = [0.5] * 3
    size = {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096}
    own = source.with_defaults(size=size, image_mean=half, image_std=half)
    return resize_pairs(own, vision)


def _most_outputs(max_pixels: int, unit: int) -> int:
    """Return the maximum number of embeddings of an image, also of the most oblong ones, which have a single row."""
    return max(max_pixels // unit**2, math.isqrt(MAX_RATIO * max_pixels) // unit)


def resize_rounded(source: ProcessorSource, vision: GridVisionSpec) -> ResizeProcessor:
    """Return the processor of PaddleOCR-VL."""
    own = source.with_defaults(size={"shortest_edge": 384**2, "longest_edge": 1536**2})
    return msgspec.structs.replace(resize(own, vision), grows="round")


def resize_whole_patches(
    source: ProcessorSource, vision: GridVisionSpec
) -> ResizeProcessor | CanvasProcessor:
    """Return the processor of Nemotron Omni, whose limits count patches and depend on a maximum context.

    Nemotron Nano VL 2 reads images as tiles, as InternVL does.
    """
    fields, patch, merge = source.fields, vision.patch_size, vision.merge_size
    source = source.with_defaults(
        image_mean=fields.get("norm_mean"), image_std=fields.get("norm_std")
    )
    if source.config.get("model_type") == "NemotronH_Nano_VL_V2":
        size = fields.integer("image_size", 512, maximum=MAX_SIDE)
        if size % vision.unit:
            raise fields.wrong("image_size", f"a multiple of {vision.unit}", size)
        fields.require("use_thumbnail", True)
        return CanvasProcessor(
            **CLIP_VALUES | source.pixel_values(BICUBIC),
            output_size=vision.output_size,
            num_outputs=(size // vision.unit) ** 2,
            side=size,
            max_tiles=fields.integer("max_num_tiles", 12, maximum=MAX_TILES),
            start="<img>",
            end="</img>",
        )
    fields.require("patch_size", patch, _AS_IN_TOWER)
    fields.require("downsample_ratio", 1 / merge, _AS_IN_TOWER, default=1 / merge)
    least = fields.integer("min_num_patches", 1024, maximum=_MAX_PIXELS // patch**2)
    most = max(least, merge**2 * (fields.integer("max_model_len", 16_384, minimum=5) - 4))
    limit = fields.integer("max_num_patches", 13_312, minimum=0)
    most = max(least, merge**2, min(most, limit or most))
    return ResizeProcessor(
        **CLIP_VALUES | source.pixel_values(BICUBIC),
        output_size=vision.output_size,
        num_outputs=most // merge**2,
        unit=vision.unit,
        patch_size=patch,
        min_pixels=least * patch**2,
        max_pixels=most * patch**2,
        start="<img>",
        end="</img>",
    )


def resize_scaled(source: ProcessorSource, vision: GridVisionSpec) -> ResizeProcessor:
    """Return the processor of Isaac, whose config has limits that count patches."""
    patch, merge = vision.patch_size, vision.merge_size
    config = source.config
    source = source.with_defaults(
        max_num_patches=config.get("vision_max_num_patches", 6144),
        min_num_patches=config.get("vision_min_num_patches", 256),
        pixel_shuffle_scale=config.get("pixel_shuffle_scale", merge),
    )
    fields = source.fields
    fields.require("pixel_shuffle_scale", merge, _AS_IN_TOWER)
    most = fields.integer("max_num_patches", minimum=merge**2, maximum=_MAX_PIXELS // patch**2)
    least = fields.integer("min_num_patches", minimum=1, maximum=most)
    half = (0.5,) * 3
    return ResizeProcessor(
        **source.pixel_values(BICUBIC) | {"mean": half, "std": half},
        output_size=vision.output_size,
        num_outputs=most // merge**2,
        unit=vision.unit,
        min_pixels=least * patch**2,
        max_pixels=most * patch**2,
        grows="scaled",
        mark="<image>",
    )


def resize_stepped(source: ProcessorSource, vision: GridVisionSpec) -> ResizeProcessor:
    """Return the processor of Youtu-VL, whose own code has another limit than its file."""
    fields, patch = source.fields, vision.patch_size
    fields.require("patch_size", patch, _AS_IN_TOWER)
    least = vision.merge_size**2
    most = fields.integer(
        "max_image_patches", 36_864, minimum=least, maximum=_MAX_PIXELS // patch**2
    )
    return ResizeProcessor(
        **source.pixel_values(BILINEAR),
        output_size=vision.output_size,
        num_outputs=most // least,
        unit=vision.unit,
        min_pixels=vision.unit**2,
        max_pixels=most * patch**2,
        grows="stepped",
    )


def resize_many(source: ProcessorSource, vision: GridVisionSpec) -> ResizeProcessor:
    """Return the processor of ERNIE 4.5 VL."""
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 6177}
    return resize(source.with_defaults(size=size), vision)


def resize_own_mark(source: ProcessorSource, vision: GridVisionSpec) -> ResizeProcessor:
    """Return the processor of ERNIE 4.5 VL for the chat template that was first published."""
    return msgspec.structs.replace(resize_many(source, vision), mark="<|image@placeholder|>")


def resize_lines(source: ProcessorSource, vision: GridVisionSpec) -> ResizeProcessor:
    """Return the processor of Hunyuan-OCR and Hy4-VL, which ignore the resampling filter of their file."""
    size = {"shortest_edge": 512**2, "longest_edge": 2048**2}
    own = source.with_defaults(size=size).with_values({"resample": BICUBIC})
    config = resize(own, vision)
    # The number of rows is largest for the most oblong images.
    most = config.num_outputs + math.isqrt(MAX_RATIO * config.num_outputs) + 3
    return msgspec.structs.replace(config, num_outputs=most, newlines=vision.newlines)


def resize_between_marks(source: ProcessorSource, vision: GridVisionSpec) -> ResizeProcessor:
    """Return the processor of MiniMax M3, which names the marks around an image itself."""
    if source.fields.get("size") in (None, [672, 672]):
        # Published files have a size that is not used.
        source = source.with_values({"size": {"shortest_edge": 56**2, "longest_edge": 672**2}})
    config = resize(source, vision)
    return msgspec.structs.replace(config, start="]<]start of image[>[", end="]<]end of image[>[")


def pad(source: ProcessorSource, vision: GridVisionSpec) -> PadProcessor:
    """Return the processor of Kimi K2.5, whose file uses its own field names."""
    own = source.fields.first_section("media_proc_cfg")
    source = source.with_defaults(
        max_patches=own.get("in_patch_limit", 16384),
        image_mean=own.get("image_mean", [0.5] * 3),
        image_std=own.get("image_std", [0.5] * 3),
    )
    fields = source.fields
    size = fields.first_section("size")
    most = size.integer("max_height", own.integer("patch_limit_on_one_side", 512), maximum=4096)
    check_patches(fields, vision)
    max_patches = fields.integer("max_patches", maximum=_MAX_PIXELS)
    return PadProcessor(
        **source.pixel_values(BICUBIC),
        output_size=vision.output_size,
        # The padding of a long image adds some embeddings.
        num_outputs=max_patches // vision.merge_size**2 + 2 * most,
        unit=vision.unit,
        patch_size=vision.patch_size,
        max_patches=max_patches,
        max_side=most,
    )


def pad_limited(source: ProcessorSource, vision: GridVisionSpec) -> PadProcessor:
    """Return the processor of Kimi-VL, which has no positions for sides of 512 patches or more.

    Longer images, which its authors' code refuses, are shrunk.
    """
    fields, merge = source.fields, vision.merge_size
    fields.require("patch_size", vision.patch_size, _AS_IN_TOWER)
    fields.require("merge_kernel_size", [merge, merge], _AS_IN_TOWER)
    fields.require("pad_input", True, default=False)
    max_patches = fields.integer("in_token_limit", 4096, maximum=_MAX_PIXELS)
    max_side = _KIMI_SIDE // merge * merge
    return PadProcessor(
        **CLIP_VALUES | source.pixel_values(BICUBIC),
        output_size=vision.output_size,
        num_outputs=max_patches // merge**2 + 2 * max_side,
        unit=vision.unit,
        patch_size=vision.patch_size,
        max_patches=max_patches,
        max_side=max_side,
    )


def pad_named(source: ProcessorSource, vision: GridVisionSpec) -> PadProcessor:
    """Return the processor of LocateAnything, which is Kimi-VL's with prompts that name images by their numbers."""
    half = {f"image_{name}": [0.5] * 3 for name in ("mean", "std")}
    found = pad_limited(source.with_defaults(pad_input=True, **half), vision)
    return msgspec.structs.replace(found, mark="<image-{}>", start="<img>", end="</img>")


def pad_whole(source: ProcessorSource, vision: GridVisionSpec) -> PadProcessor:
    """Return the processor of Inkling 2, which keeps the size of images.

    Images that take more than `max_image_tokens`, or have a side of more than 2,048 patches, are shrunk. Transformers
    has no such limits.
    """
    fields = source.fields
    for name in ("height", "width"):
        sides(fields, "size").require(name, vision.unit, _AS_IN_TOWER)
    most = fields.integer("max_image_tokens", 16_384, maximum=_MAX_PIXELS // vision.unit**2)
    return PadProcessor(
        **source.pixel_values(BICUBIC),
        output_size=vision.output_size,
        # Each side may have half an embedding more.
        num_outputs=most + _INKLING_SIDE,
        unit=vision.unit,
        patch_size=vision.patch_size,
        max_patches=most * vision.merge_size**2,
        max_side=_INKLING_SIDE,
        background="checkers",
    )


def corner(source: ProcessorSource, vision: GridVisionSpec) -> CornerProcessor:
    """Return the processor of GLM-5.3-Flash, whose limits count embeddings."""
    fields = source.fields
    check_patches(fields, vision)
    most = fields.integer("max_image_tokens", 8000, maximum=_MAX_PIXELS // vision.unit**2)
    return CornerProcessor(
        **CLIP_VALUES | source.pixel_values(BICUBIC),
        output_size=vision.output_size,
        num_outputs=most,
        unit=vision.unit,
        min_outputs=fields.integer("min_image_tokens", 16, maximum=most),
    )


def check_patches(fields: ConfigFields, vision: GridVisionSpec) -> None:
    """Raise CheckpointError unless the processor's patch sizes equal those of the vision tower."""
    for name, size in (
        ("patch_size", vision.patch_size),
        ("merge_size", vision.merge_size),
        ("temporal_patch_size", vision.frames_per_patch),
    ):
        fields.require(name, size, _AS_IN_TOWER)


def pixel_limits(fields: ConfigFields, least: int, most: int) -> tuple[int, int]:
    """Return the minimum and maximum number of pixels; `least` and `most` are the defaults."""
    size = fields.first_section("size")
    least = size.integer("shortest_edge", least, maximum=_MAX_PIXELS)
    most = size.integer("longest_edge", most)
    least = fields.integer("min_pixels", least, maximum=_MAX_PIXELS)
    return least, max(least, fields.integer("max_pixels", most))
