"""Choose the function that reads a published config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ..config_fields import ConfigFields
from .blip import blip
from .deepseek import unlimited_ocr
from .florence import florence2
from .git import git
from .glm_edge import glm_edge
from .janus import multi_modality
from .kosmos2 import kosmos2
from .llava import llava, phi4
from .meralion import meralion2
from .modernvbert import modernvbert, ultravbert
from .molmo import molmo
from .moondream import moondream
from .nemotron_parse import nemotron_parse
from .openvla import openvla
from .renamed import (
    alpamayo2,
    colqwen3,
    dots_vlm,
    interns2,
    interns2_mobius,
    ling3_vl,
    llama_nemotron_vl,
    openpangu_vl,
)
from .trocr import formula_net, image_encoder_decoder, pix2struct

_READERS: Final[dict[str, Callable[[ConfigFields, str], dict[str, Any]]]] = {
    "Alpamayo2Super": alpamayo2,
    "BailingMoeV3VLForConditionalGeneration": ling3_vl,
    "BlipForConditionalGeneration": blip,
    "ColQwen3": colqwen3,
    "DotsVLMForCausalLM": dots_vlm,
    "Florence2ForConditionalGeneration": florence2,
    "GitForCausalLM": git,
    "GlmForCausalLM": glm_edge,
    "InternS2MobiusForConditionalGeneration": interns2_mobius,
    "InternS2PreviewForConditionalGeneration": interns2,
    "HfMoondream": moondream,
    "Kosmos2ForConditionalGeneration": kosmos2,
    "LlamaNemotronVLForSequenceClassification": llama_nemotron_vl,
    "LlamaNemotronVLModel": llama_nemotron_vl,
    "LlavaLlamaForCausalLM": llava,
    "LlavaMistralForCausalLM": llava,
    "LlavaQwenForCausalLM": llava,
    "MERaLiON2ForConditionalGeneration": meralion2,
    "ModernVBertForSequenceClassification": modernvbert,
    "ModernVBertForTokenClassification": modernvbert,
    "MolmoForCausalLM": molmo,
    "Moondream3ForCausalLM": moondream,
    "MultiModalityCausalLM": multi_modality,
    "NemotronParseForConditionalGeneration": nemotron_parse,
    "OpenPanguVLForConditionalGeneration": openpangu_vl,
    "OpenVLAForActionPrediction": openvla,
    "OpsColQwen3Model": colqwen3,
    "PPFormulaNetForConditionalGeneration": formula_net,
    "Phi4ForCausalLMV": phi4,
    "Pix2StructForConditionalGeneration": pix2struct,
    "Qwen3VLNemotronEmbedModel": colqwen3,
    "UltraVBertForMaskedLM": ultravbert,
    "UltraVBertForSequenceClassification": ultravbert,
    "UltraVBertForTokenClassification": ultravbert,
    "UltraVBertModel": ultravbert,
    "UnlimitedOCRForCausalLM": unlimited_ocr,
    "UnlimitedOcrForConditionalGeneration": unlimited_ocr,
    "VisionEncoderDecoderModel": image_encoder_decoder,
}


def published_fields(fields: ConfigFields) -> dict[str, Any]:
    """Return the fields that transformers has in the place of a published config's; none if it has the same ones.

    `image_token_texts` are the tokens that may stand for images, of which the tokenizer has the first or a later one.
    `image_mark` is the text that stands for an image in prompts, if it is not the token's. `image_processor` has the
    fields of an image processor whose file is missing or omits them, and `image_limits` those that replace the file's.
    `vision_tower_field` is the field that names the checkpoint of the tower, which the model's own may omit.
    `image_parts` are the names of parts that do not belong to the decoder, although their tensors look like its own.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    for name in fields.texts("architectures"):
        if name in _READERS:
            return _READERS[name](fields, name)
    return {}
