"""Read the image processors that make one tile per image, such as those of CLIP, SigLIP, Aria and Chameleon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ....protocol.checkpoint.vision.convolutional.codes import CodesVisionSpec
from ....protocol.checkpoint.vision.convolutional.davit import DavitSpec
from ....protocol.checkpoint.vision.convolutional.fastvit import FastVitSpec
from ....protocol.checkpoint.vision.convolutional.swin import SwinSpec
from ....protocol.checkpoint.vision.deepseek import SamVisionSpec
from ....protocol.checkpoint.vision.grid import GridVisionSpec
from ....protocol.checkpoint.vision.pairs.prismatic import PairVisionSpec
from ....protocol.checkpoint.vision.spec import MAX_SIDE, VisionSpec
from ....protocol.config.images.single import (
    CropProcessor,
    LongestProcessor,
    PageProcessor,
    SquareProcessor,
)
from ....protocol.config.images.sized import FitProcessor, PatchesProcessor
from ....protocol.errors import CheckpointError
from .fields import (
    BICUBIC,
    BILINEAR,
    CLIP_VALUES,
    HALF_VALUES,
    IMAGENET_VALUES,
    LANCZOS,
    side_of_tile,
    sides,
)
from .pixtral import pixtral
from .source import ProcessorSource


def single(
    source: ProcessorSource, vision: VisionSpec
) -> SquareProcessor | CropProcessor | FitProcessor:
    """Return the processor of CLIP, SigLIP or (under the same model name) Pixtral."""
    if vision.max_outputs:
        return pixtral(source, vision)
    common = source.values(vision, BICUBIC)
    if vision.has_class_token:
        common = CLIP_VALUES | common
    if source.config.get("image_aspect_ratio") == "pad":
        # The original LLaVA's own processor makes a square before the tower's.
        return SquareProcessor(**common, side=vision.image_size, pads=True)
    return _tile(source, vision, common | {"stands_alone": vision.stands_alone})


def numbered(
    source: ProcessorSource, vision: VisionSpec
) -> SquareProcessor | CropProcessor | FitProcessor:
    """Return the processor of Mantis (arXiv 2405.01483), whose images have numbers."""
    return replace(
        single(source, vision),
        number_start="(image ",
        number_end=": <Image>",
        first_number=1,
        end="</Image>)",
    )


def single_first(
    source: ProcessorSource, vision: VisionSpec
) -> SquareProcessor | CropProcessor | FitProcessor:
    """Return the processor of GIT, whose prompts begin with the only image."""
    start = source.special_token("cls_token", "[CLS]")
    return replace(single(source, vision), after_images=start, is_required=True, max_images=1)


def with_instruction(source: ProcessorSource, vision: VisionSpec) -> SquareProcessor:
    """Return the processor of InstructBLIP, whose Q-Former has a tokenizer of its own."""
    assert vision.former is not None
    directory = source.path / "qformer_tokenizer"
    if not (directory / "tokenizer.json").is_file():
        raise CheckpointError(directory, "has no tokenizer.json, the tokenizer of the Q-Former")
    return SquareProcessor(
        **CLIP_VALUES | source.values(vision, BICUBIC),
        side=source.tile_side(vision),
        precedes_prompt=True,
        instruction_tokenizer=str(directory),
        max_instruction_tokens=vision.former.max_text_tokens,
        is_required=True,
        max_images=1,
    )


def between_image_marks(
    source: ProcessorSource, vision: VisionSpec
) -> SquareProcessor | CropProcessor | FitProcessor:
    """Return the processor of Kosmos-2, whose images are between two tokens."""
    return replace(single(source, vision), start="<image>", end="</image>")


def middle(
    source: ProcessorSource, vision: FastVitSpec | SamVisionSpec
) -> SquareProcessor | CropProcessor:
    """Return the processor of FastVLM, which is that of CLIP, or of GOT-OCR 2, which does not crop."""
    common = CLIP_VALUES | source.values(vision, BICUBIC)
    return _tile(source, vision, common)


def repeated(source: ProcessorSource, vision: SamVisionSpec) -> SquareProcessor | CropProcessor:
    """Return the processor of PP-Chart2Table, whose chat template writes a token for each embedding."""
    config = middle(source, vision)
    return replace(config, mark="<imgpad>" * config.num_outputs)


def repeated_tokens(source: ProcessorSource, vision: VisionSpec) -> SquareProcessor:
    """Return the processor of GLM-Edge-V, whose chat template writes a token for each embedding."""
    common = HALF_VALUES | source.values(vision, BICUBIC)
    config = SquareProcessor(**common, side=source.tile_side(vision))
    return replace(config, mark="<|begin_of_image|>" * config.num_outputs)


def _tile(
    source: ProcessorSource,
    vision: VisionSpec | FastVitSpec | SamVisionSpec,
    common: dict[str, Any],
) -> SquareProcessor | CropProcessor:
    size, crop = sides(source.fields, "size"), sides(source.fields, "crop_size")
    if size.get("shortest_edge") is None:
        side = side_of_tile(size, "height", vision)
        if source.fields.boolean("do_center_crop", False):
            side_of_tile(crop, "height", vision)
        return SquareProcessor(**common, side=side)
    source.fields.require("do_center_crop", True, " if size has a shortest_edge")
    side = side_of_tile(crop, "height", vision)
    return CropProcessor(
        **common,
        side=side,
        shortest_edge=size.integer("shortest_edge", minimum=side, maximum=MAX_SIDE),
    )


def padded_square(source: ProcessorSource, vision: VisionSpec) -> SquareProcessor:
    """Return the processor of MobileVLM, which first completes an image to a square."""
    side = source.tile_side(vision)
    common = CLIP_VALUES | source.values(vision, BICUBIC)
    return SquareProcessor(**common, side=side, pads=True)


def square_between_marks(source: ProcessorSource, vision: VisionSpec) -> SquareProcessor:
    """Return the processor of GLM-4V 9B, whose tower computes the embeddings of the marks, too."""
    config, side = source.config, vision.image_size
    start, end = "<|begin_of_image|>", "<|end_of_image|>"
    return SquareProcessor(
        **CLIP_VALUES | source.values(vision, BICUBIC),
        side=side,
        grid_side=side // vision.patch_size // vision.merge_factor,
        mark=f"{start}<|endoftext|>{end}",
        mark_ids=(config.integer("boi_token_id"), config.integer("eoi_token_id")),
        mark_texts=(start, end),
    )


def square_for_two(source: ProcessorSource, vision: PairVisionSpec) -> SquareProcessor:
    """Return the processor of OpenVLA, whose file has values for both towers, and whose images precede the text."""
    fields, side = source.fields, vision.image_size
    fields.require("image_resize_strategy", "resize-naive")
    fields.require("input_sizes", [[3, side, side]] * 2, ", as in the vision towers")
    own: dict[str, object] = {}
    for name, second in (("mean", vision.mean), ("std", vision.std)):
        given = fields.get(f"{name}s")
        if given is not None:
            if not isinstance(given, list) or len(given) != 2 or given[1] != list(second):
                raise fields.wrong(f"{name}s", f"two lists, the second of which is {second}", given)
            own[f"image_{name}"] = given[0]
    values = IMAGENET_VALUES | source.with_values(own).pixel_values(BICUBIC)
    sizes = {"output_size": vision.output_size, "num_outputs": vision.num_outputs}
    start = source.special_token("bos_token", "<s>")
    return SquareProcessor(**values | sizes, side=side, prompt_start=start)


def page(source: ProcessorSource, vision: GridVisionSpec) -> PageProcessor:
    """Return the processor of Nemotron Parse."""
    assert vision.page is not None
    sizes = {"output_size": vision.output_size, "num_outputs": vision.num_page_outputs}
    return PageProcessor(
        **CLIP_VALUES | sizes | source.pixel_values(BILINEAR),
        max_images=1,
        width=vision.page.width,
        height=vision.page.height,
    )


def filled_page(source: ProcessorSource, vision: SwinSpec | SamVisionSpec) -> PageProcessor:
    """Return the processor of Donut, in whose older files the size is a list with the width first."""
    fields = source.fields
    fields.require_all(
        do_thumbnail=True, do_align_long_axis=False, do_pad=True, do_crop_margin=False
    )
    size = fields.get("size")
    if isinstance(size, list) and len(size) == 2:
        fields = fields.with_values({"size": {"height": size[1], "width": size[0]}})
    named = fields.first_section("size")
    for name, length in (("height", vision.height), ("width", vision.width)):
        named.require(name, length, ", as in the vision tower", default=length)
    sizes = {"output_size": vision.output_size, "num_outputs": vision.num_page_outputs}
    return PageProcessor(
        **HALF_VALUES | sizes | source.pixel_values(BILINEAR),
        max_images=1,
        width=vision.width,
        height=vision.height,
        fills_width=True,
    )


def cropped_page(source: ProcessorSource, vision: SwinSpec | SamVisionSpec) -> PageProcessor:
    """Return the processor of Nougat, which removes the margins of a page."""
    crops = source.fields.boolean("do_crop_margin", True)
    own = source.with_values({"do_crop_margin": None})
    statistics = {f"image_{name}": [*values] for name, values in IMAGENET_VALUES.items()}
    page = filled_page(own.with_defaults(**statistics), vision)
    return replace(page, crops_margins=crops, shrink_resample=BICUBIC)


def formula(source: ProcessorSource, vision: SamVisionSpec) -> PageProcessor:
    """Return the processor of PP-FormulaNet, which is that of Nougat with other values."""
    side = vision.image_size
    defaults = {"image_mean": [0.7931] * 3, "image_std": [0.1738] * 3, "size": [side, side]}
    return cropped_page(source.with_defaults(**defaults), vision)


def read_square(source: ProcessorSource, vision: VisionSpec) -> SquareProcessor:
    """Return the processor of TrOCR, in whose file one number is the length of both sides."""
    source.fields.require("do_center_crop", False)
    size = source.fields.get("size")
    both = {"height": size, "width": size} if isinstance(size, int) else size
    source = source.with_values({"size": both})
    common = HALF_VALUES | source.values(vision, BILINEAR)
    return SquareProcessor(**common, side=source.tile_side(vision), max_images=1, is_read=True)


def patches(source: ProcessorSource, vision: VisionSpec) -> PatchesProcessor:
    """Return the processor of Pix2Struct, which draws the text of a prompt on the image if `is_vqa`.

    Raises:
        CheckpointError: A field is invalid, or the font of such texts is missing.
    """
    fields, side = source.fields, vision.patch_size
    font = ""
    if fields.boolean("is_vqa", False):
        font = fields.text("font_path", str(source.path / "Arial.TTF"))
        if not Path(font).is_file():
            raise fields.error(
                f"is_vqa needs a font for questions, and there is no file {font}; "
                """name one with --mm-processor-kwargs '{"font_path": "…"}'"""
            )
    size = sides(fields, "patch_size")
    for name in ("height", "width"):
        size.require(name, side, ", as in the vision tower", default=16)
    common = source.with_values({"rescale_factor": None, "resample": None})
    values = common.with_values({"do_rescale": False}).values(vision, BILINEAR)
    # Transformers has this maximum wherever it is not called with another one.
    most = fields.integer("max_patches", 2048, maximum=vision.num_positions)
    return PatchesProcessor(
        **values | {"num_outputs": most},
        patch_size=side,
        max_patches=most,
        normalizes=fields.boolean("do_normalize", True),
        font=font,
        is_required=True,
        max_images=1,
    )


def square(source: ProcessorSource, vision: DavitSpec) -> SquareProcessor:
    """Return the processor of Florence-2, whose tower reads images of any size."""
    size = sides(source.fields, "size")
    side = size.integer("height", 768, maximum=MAX_SIDE)
    size.require("width", side, ", as height")
    if not 0 < vision.num_places(side) <= vision.num_positions:
        needed = f"a size with 1 to {vision.num_positions} embeddings in each direction"
        raise size.wrong("height", needed, side)
    sizes = {"output_size": vision.output_size, "num_outputs": vision.num_outputs_of(side)}
    return SquareProcessor(**CLIP_VALUES | sizes | source.pixel_values(BICUBIC), side=side)


def crop_codes(source: ProcessorSource, vision: CodesVisionSpec) -> CropProcessor:
    """Return the processor of Chameleon."""
    size, crop = sides(source.fields, "size"), sides(source.fields, "crop_size")
    side = crop.integer("height", 512, maximum=MAX_SIDE)
    crop.require("width", side, ", as height", default=512)
    if side % vision.unit:
        needed = f"a multiple of {vision.unit}, the pixels of a code of the tower"
        raise crop.wrong("height", needed, side)
    ones = (1.0,) * 3
    return CropProcessor(
        **{"mean": ones, "std": ones}
        | source.with_defaults(rescale_factor=0.0078).pixel_values(LANCZOS),
        output_size=vision.output_size,
        num_outputs=(side // vision.unit) ** 2,
        side=side,
        shortest_edge=size.integer("shortest_edge", 512, minimum=side, maximum=MAX_SIDE),
        start=source.special_token("boi_token", "<racm3:break>"),
        end=source.special_token("eoi_token", "<eoss>"),
    )


def longest(source: ProcessorSource, vision: VisionSpec) -> LongestProcessor:
    """Return the processor of Aria, without its option to split images."""
    fields = source.fields
    fields.require("split_image", False)
    side = fields.integer("max_image_size", 980)
    counts = {patches * vision.patch_size: count for patches, count in vision.query_counts}
    if side not in counts:
        raise fields.wrong("max_image_size", f"one of {', '.join(map(str, counts))}", side)
    common = source.values(vision, BICUBIC) | {"num_outputs": counts[side]}
    return LongestProcessor(
        **common, side=side, least=fields.integer("min_image_size", 336, maximum=side)
    )
