"""Read the image processors of Molmo 1 and 2."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.checkpoint.vision.tiled.molmo import MARGINS, POOL_SIDE, PooledVisionSpec
from .....protocol.config.images.tiles import OverlapsProcessor
from ....media.layouts.overlaps import most_outputs
from ..fields import BILINEAR, CLIP_VALUES, side_of_tile, sides
from ..source import MAX_TILES, ProcessorSource

_TEXTS = ("<im_col>", "<low_res_im_start>", "<im_start>", "<im_end>")


def overlaps(source: ProcessorSource, vision: PooledVisionSpec) -> OverlapsProcessor:
    """Return the processor of Molmo 2."""
    fields, tower = source.fields, vision.tower
    for name, needed in (
        ("patch_size", tower.patch_size),
        ("overlap_margins", [*MARGINS]),
        ("pooling_size", [POOL_SIDE] * 2),
        ("resample", BILINEAR),
    ):
        fields.require(name, needed)
    tokens = ConfigFields.read_if_present(source.path / "processor_config.json")
    ends = tokens.boolean("image_use_col_tokens", True)
    marks = list(zip(_TEXTS, vision.token_ids[1:], strict=True))
    if vision.has_margins:
        marks[1] = marks[2]
    if not tokens.boolean("use_single_crop_start_token", True):
        marks[1] = marks[2]
    config = OverlapsProcessor(
        **source.pixel_values(BILINEAR),
        output_size=vision.output_size,
        num_outputs=1,
        max_images=1,
        mark="<|image|>",
        mark_ids=tuple(id_ for _, id_ in marks),
        mark_texts=tuple(text for text, _ in marks),
        side=side_of_tile(sides(fields, "size"), "height", tower),
        window=vision.window * tower.patch_size,
        unit=POOL_SIDE * tower.patch_size,
        max_tiles=fields.integer("max_crops", 8, maximum=MAX_TILES),
        ends_rows=ends,
        ends_whole_rows=tokens.boolean("use_single_crop_col_tokens", ends),
    )
    return replace(config, num_outputs=most_outputs(config))


def padded_overlaps(source: ProcessorSource, vision: PooledVisionSpec) -> OverlapsProcessor:
    """Return the processor of Molmo 1, which keeps the shape of an image, and puts all images before the text."""
    fields, tower = source.fields, vision.tower
    sizes = {
        "base_image_input_size": [tower.image_size] * 2,
        "image_patch_size": tower.patch_size,
        "image_token_length_w": vision.num_patches // POOL_SIDE,
        "image_token_length_h": vision.num_patches // POOL_SIDE,
    }
    for name, needed in sizes.items():
        fields.require(name, needed, ", as in the vision tower")
    own = source.with_defaults(
        max_crops=12, **{f"image_{name}": values for name, values in _CLIP_LISTS.items()}
    ).with_values({"size": None, "patch_size": None, "resample": BILINEAR})
    start = source.special_token("bos_token", source.special_token("eos_token"))
    config = replace(overlaps(own, vision), pads=True, prompt_start=start, max_images=0)
    return replace(config, num_outputs=most_outputs(config))


_CLIP_LISTS: Final = {name: list(values) for name, values in CLIP_VALUES.items()}
