"""Choose and run the reader for a checkpoint's image processor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.gguf_config.mmproj.fields import Mmproj
from ....protocol.checkpoint.vision.read import vision_spec
from ....protocol.checkpoint.vision.spec import VisionSpec
from ....protocol.checkpoint.vision_kind import model_kind
from ....protocol.checkpoint.vision_presence import has_vision
from ....protocol.config.images.processors import AnyImageProcessor
from ....protocol.errors import CheckpointError
from ...tokenizer.config import TokenizerConfig
from .anyres import anyres, rows
from .gemma import gemma3, gemma3n, gemma4, gemma4_unified, paligemma
from .idefics3 import grid, pages, quarters
from .lfm2 import thumbnail
from .llama4 import mosaic, tiles
from .margins import margins, margins_between_marks, margins_with_copy
from .muse import muse
from .pixtral import lighton_ocr, pixtral
from .qwen import (
    corner,
    pad,
    pad_limited,
    pad_named,
    pad_whole,
    resize,
    resize_before_lines,
    resize_between_marks,
    resize_codes,
    resize_described,
    resize_frames,
    resize_lines,
    resize_many,
    resize_nested,
    resize_own_mark,
    resize_pairs,
    resize_patches,
    resize_rounded,
    resize_scaled,
    resize_single,
    resize_stepped,
    resize_whole_patches,
    resize_words,
)
from .single import (
    between_image_marks,
    crop_codes,
    cropped_page,
    filled_page,
    formula,
    longest,
    middle,
    numbered,
    padded_square,
    page,
    patches,
    read_square,
    repeated,
    repeated_tokens,
    single,
    single_first,
    square,
    square_between_marks,
    square_for_two,
    with_instruction,
)
from .source import ProcessorSource
from .tiled.cohere import aya_vision, cohere2_vision
from .tiled.internvl import (
    IMAGE_CONTEXT,
    area_canvas,
    canvas,
    described_canvas,
    double_canvas,
    half_canvas,
    labeled_canvas,
    lined_canvas,
    numbered_canvas,
    views,
    views_of_one,
    views_with_rows,
)
from .tiled.minicpm import slices, slices_of_queries
from .tiled.molmo import overlaps, padded_overlaps
from .tiled.moondream import windows
from .tiled.ovis import cover
from .tiled.perception import whole_first
from .tiled.phi4 import bands, crops
from .tiled.step import cuts

logger = logging.getLogger(__name__)

_PHI4_TOKEN_ID: Final = 200_010
_GLM_TOKEN_ID: Final = 151_329
_TOKEN_TEXTS: Final = {
    "deepseek_ocr": "<image>",
    "deepseek_vl_v2": "<image>",
    "dots3_note": "<|imgpad|>",
    "h2ovl_chat": IMAGE_CONTEXT,
    "internvl_chat": IMAGE_CONTEXT,
    "isaac": "<|image_pad|>",
    "Llama_Nemotron_Nano_VL": "<image>",
    "mimo_v2": "<|image_pad|>",
    "minicpmo": "<unk>",
    "minicpmv": "<unk>",
    "NVLM_D": "<|vision_pad|>",
    "ovis2_5": "<|image_pad|>",
    "phi3_v": "<|image|>",
    "unlimited_ocr": "<image>",
    "pointsv1.5_chat": "<|image_pad|>",
}
"""The texts of placeholder tokens whose ids are not in the config, by model type."""

_WITHOUT_FILE: Final = (
    "chatglm",
    "deepseek_ocr",
    "deepseek_ocr2",
    "deepseek_vl_v2",
    "h2ovl_chat",
    "internvl_chat",
    "isaac",
    "llama_nemotron_vl",
    "mimo_v2",
    "NVLM_D",
    "openvla",
    "step3",
    "step3_vl",
    "step3p7",
    "step5_vl",
    "unlimited_ocr",
)
"""Models whose config or own code describes how images are read, so that there may be no file of a processor."""

_FILES: Final = ("preprocessor_config.json", "processor_config.json")


def read_image_processor(
    path: Path,
    config: ConfigFields,
    text: ConfigFields,
    overrides: Mapping[str, object],
    mmproj: Mmproj | None = None,
) -> AnyImageProcessor | None:
    """Return the model's image preprocessing; None if it reads no images, or if the processor's file is missing.

    Args:
        path: The directory of the checkpoint.
        config: The config of the checkpoint.
        text: The text decoder's section of the config.
        overrides: Fields that replace those of the processor.
        mmproj: The file with the vision tower of a GGUF model.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    if not has_vision(config) or not (path.is_dir() or mmproj is not None):
        return None
    vision = vision_spec(config, text.integer("hidden_size"))
    tokens: Mapping[str, str] = {}
    if mmproj is None:
        processor = _read_processor(path)
    else:
        processor, tokens = ConfigFields(mmproj.processor, path), mmproj.tokens
    if processor is None and model_kind(config) in _WITHOUT_FILE:
        processor = ConfigFields({}, path)
    # Mistral's own format and LLaVA's need no file of it.
    without_file = config.section("image_processor")
    if without_file is not None:
        processor = (processor or without_file).with_defaults(**without_file.config)
    if processor is None:
        logger.warning("%s has no %s, so requests with images are rejected", path, _FILES[0])
        return None
    stands_alone = isinstance(vision, VisionSpec) and vision.stands_alone
    # The token in the place of an image that stands alone has no meaning.
    token_id = 0 if stands_alone else image_token_id(path, config, text.integer("vocab_size"))
    read = _READERS[model_kind(config)]
    if read not in (cover, pages):
        # The processors of InternVL and DeepSeek-OCR 2 ignore this field of the file.
        processor = processor.with_values({"crop_to_patches": None})
    processor = processor.with_values(config.first_section("image_limits").config)
    fields = processor.with_values(dict(overrides))
    fields.require("do_resize", True)
    found = read(ProcessorSource(path, fields, config, tokens, token_id), vision)
    mark = config.text("image_mark", "")
    return msgspec.structs.replace(found, mark=mark) if mark else found


def image_token_id(path: Path, config: ConfigFields, vocab_size: int) -> int:
    """Return the placeholder token of images. Raise CheckpointError if the config or the tokenizer lacks it."""
    named = _TOKEN_TEXTS.get(model_kind(config))
    texts = config.texts("image_token_texts") or ([] if named is None else [named])
    # The configs of GGUF models have the id.
    if texts and config.get("image_token_id") is None:
        tokenizer = TokenizerConfig(path)
        ids = (tokenizer.added_token_id(text) for text in texts)
        found_id = next((id_ for id_ in ids if id_ is not None and id_ < vocab_size), None)
        if found_id is None:
            raise CheckpointError(
                path,
                f"the tokenizer has no token {' or '.join(map(repr, texts))} below {vocab_size}; download it again",
            )
        return found_id
    names = (
        "image_token_id",
        "image_token_index",
        "img_context_token_id",
        "media_placeholder_token_id",
        "im_patch_id",
        "image_patch_id",
        "<image>",
    )
    sections = [config]
    if model_kind(config).startswith("phi4"):
        # The original config does not name the token.
        own = config.first_section("vision_config")
        sections.append(own.with_defaults(image_token_id=_PHI4_TOKEN_ID))
    if model_kind(config) == "chatglm":
        # The template writes this token between two marks.
        token_id = config.get("pad_token_id", _GLM_TOKEN_ID)
        sections.append(config.with_values({"image_token_id": token_id}))
    if (vocabulary := config.section("vocabulary_map")) is not None:
        sections.append(vocabulary)
    found = ((each, name) for each in sections for name in names if each.get(name) is not None)
    section, name = next(found, (config, names[0]))
    return section.integer(name, minimum=0, maximum=vocab_size - 1)


def _read_processor(path: Path) -> ConfigFields | None:
    """Return the fields of the image processor. Processors of transformers 5 have them in a section of the file."""
    for name in _FILES:
        if (path / name).is_file():
            fields = ConfigFields.read(path / name)
            found = fields.section("image_processor") or fields
            if found.get("image_processor_type") is not None or name == _FILES[0]:
                return found
    return None


_Reader: TypeAlias = Callable[[ProcessorSource, Any], AnyImageProcessor]
"""Function from the checkpoint's files and the vision tower to the image processor.

Each reader expects the tower class of its models.
"""

_READERS: Final[dict[str, _Reader]] = {
    "apertus1p5": resize_codes,
    "aria": longest,
    "aya_vision": aya_vision,
    "bailing_moe_v3_vl": resize_before_lines,
    "bee": anyres,
    "blip": read_square,
    "blip-2": single,
    "chameleon": crop_codes,
    "chatglm": square_between_marks,
    "clip": single,
    "cohere2_vision": cohere2_vision,
    "cohere_compass": resize,
    "cosmos3_edge": resize_single,
    "cosmos3_omni": resize,
    "deepseek_ocr": views_with_rows,
    "deepseek_ocr2": views,
    "deepseek_vl": margins,
    "deepseek_vl_hybrid": margins_with_copy,
    "deepseek_vl_v2": rows,
    "donut": filled_page,
    "dots3_note": resize_nested,
    "dots_ocr": resize,
    "dots_vlm": resize,
    "embedding_gemma2": gemma4,
    "eagle_2_5_vl": numbered_canvas,
    "ernie4_5_moe_vl": resize_own_mark,
    "ernie4_5_vl_moe": resize_many,
    "exaone4_5": resize,
    "fast_vlm": middle,
    "florence2": square,
    "h2ovl_chat": double_canvas,
    "hyperclovax_vision_v2": resize,
    "gemma3": gemma3,
    "gemma3n": gemma3n,
    "gemma4": gemma4,
    "gemma4_unified": gemma4_unified,
    "git": single_first,
    "instructblip": with_instruction,
    "glm4v": resize_pairs,
    "glm4v_moe": resize_pairs,
    "glm46v": resize_pairs,
    "glm5_next": corner,
    "glm_edge_v": repeated_tokens,
    "glm_ocr": resize_pairs,
    "got_ocr2": middle,
    "granite4_vision": anyres,
    "granite_docling": pages,
    "hunyuan_vl": resize_lines,
    "hy_v4_vl": resize_lines,
    "idefics2": quarters,
    "idefics3": grid,
    "inkling2": pad_whole,
    "inkling2_loop": pad_whole,
    "interns1": canvas,
    "interns1_pro": resize,
    "isaac": resize_scaled,
    "internvl": canvas,
    "internvl_chat": described_canvas,
    "janus": margins_between_marks,
    "Keye": resize_rounded,
    "KeyeVL1_5": resize_rounded,
    "kimi_k25": pad,
    "kimi_vl": pad_limited,
    "kosmos-2": between_image_marks,
    "lfm2_vl": thumbnail,
    "lfm3_vl": resize,
    "lighton_ocr": lighton_ocr,
    "Llama_Nemotron_Nano_VL": area_canvas,
    "llama_nemotron_vl": half_canvas,
    "llama4": tiles,
    "llava": single,
    "llava_next": anyres,
    "llava_next_video": anyres,
    "llava_onevision": anyres,
    "llava_onevision2": resize_frames,
    "llavaonevision1_5": resize_frames,
    "locateanything": pad_named,
    "mantis": numbered,
    "minimax_m3_vl": resize_between_marks,
    "mimo_v2": resize_described,
    "minicpm_ocr": slices,
    "minicpmo": slices_of_queries,
    "minicpmv": slices_of_queries,
    "minicpmv4_6": slices,
    "minicpmv4_7": slices,
    "mistral3": pixtral,
    "mistral_large4": pixtral,
    "mllama": mosaic,
    "mobilevlm": padded_square,
    "modernvbert": grid,
    "molmo": padded_overlaps,
    "molmo2": overlaps,
    "moondream": windows,
    "muse_glimmer": muse,
    "muse_spark": muse,
    "nemotron_h_omni": resize_whole_patches,
    "nemotron_parse": page,
    "nvila_lite": lined_canvas,
    "nougat": cropped_page,
    "pp_formulanet": formula,
    "NVLM_D": labeled_canvas,
    "opencua": resize,
    "openpangu_vl": resize,
    "openvla": square_for_two,
    "ovis2": cover,
    "ovis2_5": resize_words,
    "paddleocr_vl": resize_rounded,
    "paligemma": paligemma,
    "perception_lm": whole_first,
    "pointsv1.5_chat": resize,
    "phi3_v": bands,
    "phi4_multimodal": crops,
    "phi4mm": crops,
    "pp_chart2table": repeated,
    "qianfan_ocr": canvas,
    "qwen2_vl": resize,
    "qwen2_5_omni_thinker": resize,
    "qwen2_5_vl": resize,
    "qwen3_5": resize,
    "qwen3_5_moe": resize,
    "qwen3_omni_moe_thinker": resize,
    "qwen3_vl": resize,
    "qwen3_vl_moe": resize,
    "qwen4_exp": resize,
    "r_vl": anyres,
    "sarashina2_vision": resize,
    "siglip": single,
    "smolvlm": grid,
    "step3": cuts,
    "step3_vl": cuts,
    "step3p7": cuts,
    "step5_vl": cuts,
    "phi4_siglip": resize_patches,
    "video_llama_3": resize_patches,
    "pix2struct": patches,
    "trocr": read_square,
    "unlimited_ocr": views_of_one,
    "vipllava": single,
    "youtu_vl": resize_stepped,
}
