"""Read the image processors of PaliGemma and Gemma."""

from __future__ import annotations

from typing import Final

import msgspec

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.vision.convolutional.mobilenet import ConvVisionSpec
from ....protocol.checkpoint.vision.gemma import PatchVisionSpec
from ....protocol.checkpoint.vision.spec import MAX_SIDE, VisionSpec
from ....protocol.config.images.details import PanScanProcessor
from ....protocol.config.images.single import SquareProcessor
from ....protocol.config.images.sized import BudgetProcessor
from .fields import BICUBIC, BILINEAR
from .source import ProcessorSource

_BUDGETS: Final = (70, 140, 280, 560, 1120)


def paligemma(source: ProcessorSource, vision: VisionSpec) -> SquareProcessor:
    """Return the processor of PaliGemma, which puts the prompt's first token (BOS) after the images."""
    return SquareProcessor(
        **source.values(vision, BICUBIC),
        side=source.tile_side(vision),
        after_images=source.special_token("bos_token"),
        prompt_end="\n",
    )


def gemma3(source: ProcessorSource, vision: VisionSpec) -> PanScanProcessor:
    """Return the processor of Gemma 3."""
    fields = source.fields
    start, end = source.special_token("boi_token"), source.special_token("eoi_token")
    return PanScanProcessor(
        **source.values(vision, BILINEAR),
        side=source.tile_side(vision),
        scans=fields.boolean("do_pan_and_scan", False),
        max_crops=fields.integer("pan_and_scan_max_num_crops", 4, minimum=2, maximum=64),
        min_crop_side=fields.integer("pan_and_scan_min_crop_size", 256),
        min_ratio=fields.positive("pan_and_scan_min_ratio_to_activate", 1.2),
        mark=start,
        start=f"\n\n{start}",
        end=f"{end}\n\n",
    )


def gemma3n(source: ProcessorSource, vision: ConvVisionSpec) -> SquareProcessor:
    """Return the processor of Gemma 3n. The token after an image has an embedding of the tower."""
    fields = source.fields
    size = fields.first_section("size")
    side = size.integer("height", 224, minimum=vision.output_side, maximum=MAX_SIDE)
    size.require("width", side, ", as height")
    return SquareProcessor(
        **source.values(vision, BICUBIC),
        side=side,
        mark_ids=(source.config.integer("eoi_token_id", 262_144, minimum=0),),
        mark_texts=(source.special_token("eoi_token"),),
        start=f"\n\n{source.special_token('boi_token')}",
        end="\n\n",
    )


def gemma4(source: ProcessorSource, vision: VisionSpec) -> BudgetProcessor:
    """Return the processor of Gemma 4."""
    processor = _budget(source.with_values({"do_normalize": True}), vision)
    # The vision tower itself maps pixels to -1..1.
    return msgspec.structs.replace(processor, mean=(0.5,) * 3, std=(0.5,) * 3)


def gemma4_unified(source: ProcessorSource, vision: PatchVisionSpec) -> BudgetProcessor:
    """Return the processor of Gemma 4's unified models."""
    return _budget(source.with_defaults(do_normalize=False), vision)


def _budget(source: ProcessorSource, vision: VisionSpec | PatchVisionSpec) -> BudgetProcessor:
    tower = source.config.first_section("vision_config")
    side = tower.integer("pooling_kernel_size", 3)
    source.fields.require("pooling_kernel_size", side, ", as in vision_config")
    budget = read_budget(source.fields, vision, vision.num_outputs)
    return BudgetProcessor(
        **source.values(vision, BICUBIC) | {"num_outputs": budget},
        side_factor=vision.side_factor,
        start=source.special_token("boi_token"),
        end=source.special_token("eoi_token"),
    )


def read_budget(fields: ConfigFields, vision: VisionSpec | PatchVisionSpec, default: int) -> int:
    """Return the maximum number of embeddings of an image or a frame, for which the tower has positions."""
    name, factor = "mm_posemb_size", 1
    if isinstance(vision, VisionSpec):
        name, factor = "position_embedding_size", vision.merge_factor
    num_positions = vision.num_positions
    budget = fields.integer("max_soft_tokens", default)
    if budget not in _BUDGETS:
        raise fields.wrong("max_soft_tokens", f"one of {', '.join(map(str, _BUDGETS))}", budget)
    if budget > num_positions // factor:
        # The longer side of an image may have this many embeddings.
        needed = f"at most {num_positions // factor} for {name} {num_positions} of the tower"
        raise fields.wrong("max_soft_tokens", needed, budget)
    return budget
