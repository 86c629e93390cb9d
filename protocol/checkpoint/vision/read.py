"""Choose the function that reads a model's vision tower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from ..config_fields import ConfigFields
from ..vision_kind import model_kind, vision_section
from .aria import aria
from .convolutional.codes import CodesVisionSpec, apertus, chameleon
from .convolutional.davit import DavitSpec, florence2
from .convolutional.fastvit import FastVitSpec, fast_vlm
from .convolutional.mobilenet import ConvVisionSpec, gemma3n
from .convolutional.swin import SwinSpec, donut
from .deepseek import (
    JoinedVisionSpec,
    QueryVisionSpec,
    SamVisionSpec,
    deepseek_ocr,
    deepseek_ocr2,
    deepseek_vl2,
    formula_net,
    got_ocr2,
)
from .gemma import PatchVisionSpec, gemma3, gemma4, gemma4_unified, paligemma
from .granite import blip, blip2, granite4_vision, granite_docling, instruct_blip
from .grid import (
    GridVisionSpec,
    exaone4_5,
    glm4v,
    glm5_next,
    glm_ocr,
    hyperclovax,
    interns1_pro,
    ling3_vl,
    llava_onevision1_5,
    opencua,
    points,
    qwen2_5_omni,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_5,
    qwen3_omni,
    qwen3_vl,
    sarashina2,
)
from .grids.ernie import ernie4_5_vl
from .grids.mimo import mimo_v2
from .grids.step import step3, step3p7
from .idefics3 import idefics2, idefics3, modernvbert
from .janus import deepseek_vl, deepseek_vl_hybrid, janus
from .llama import TilesVisionSpec, llama4, mllama
from .llava import (
    bee,
    clip,
    git,
    glm4v_9b,
    glm_edge,
    kosmos2,
    llava,
    llava_next,
    llava_onevision,
    llava_onevision2,
    mobilevlm,
    nvila_lite,
    pix2struct,
    r_vl,
    siglip_alone,
    trocr,
    vipllava,
)
from .merged import (
    cosmos3_edge,
    dots3_note,
    dots_ocr,
    hunyuan_vl,
    hy_v4_vl,
    isaac,
    keye1_5,
    kimi_k25,
    lfm2_vl,
    lfm3_vl,
    minimax_m3,
    paddleocr_vl,
    phi4_siglip,
    video_llama3,
)
from .muse import (
    inkling2,
    locate_anything,
    muse,
    nemotron_omni,
    nemotron_parse,
    nemotron_vl,
    openpangu_vl,
    youtu_vl,
)
from .pairs.prismatic import PairVisionSpec, openvla
from .pixtral import mistral_large4, pixtral
from .spec import VisionSpec
from .tiled.cohere import aya_vision, cohere2_vision
from .tiled.internvl import eagle2_5, internvl, internvl_chat, nvlm_d, qianfan_ocr
from .tiled.minicpm import minicpm_ocr, minicpmv, minicpmv4_6, minicpmv4_7
from .tiled.molmo import PooledVisionSpec, molmo, molmo2
from .tiled.moondream import WindowsVisionSpec, moondream
from .tiled.ovis import ovis2, ovis2_5
from .tiled.perception import perception_lm
from .tiled.phi4 import phi3_v, phi4_multimodal

AnyVisionSpec: TypeAlias = (
    VisionSpec
    | GridVisionSpec
    | QueryVisionSpec
    | JoinedVisionSpec
    | SamVisionSpec
    | ConvVisionSpec
    | FastVitSpec
    | DavitSpec
    | SwinSpec
    | TilesVisionSpec
    | PooledVisionSpec
    | PairVisionSpec
    | WindowsVisionSpec
    | PatchVisionSpec
    | CodesVisionSpec
)


def vision_spec(fields: ConfigFields, output_size: int) -> AnyVisionSpec:
    """Return the vision tower of a model for which `has_vision` is true.

    Args:
        fields: The content of a config.json.
        output_size: The hidden size of the decoder.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    read = READERS[model_kind(fields)]
    section = vision_section(fields) or fields.required_section("vision_config")
    return read(fields, section, output_size)


READERS: Final[dict[str, Callable[[ConfigFields, ConfigFields, int], AnyVisionSpec]]] = {
    "apertus1p5": apertus,
    "aria": aria,
    "aya_vision": aya_vision,
    "bee": bee,
    "blip": blip,
    "blip-2": blip2,
    "chameleon": chameleon,
    "chatglm": glm4v_9b,
    "clip": clip,
    "cohere2_vision": cohere2_vision,
    "bailing_moe_v3_vl": ling3_vl,
    "cohere_compass": qwen3_vl,
    "cosmos3_edge": cosmos3_edge,
    "cosmos3_omni": qwen3_vl,
    "deepseek_ocr": deepseek_ocr,
    "deepseek_ocr2": deepseek_ocr2,
    "deepseek_vl": deepseek_vl,
    "deepseek_vl_hybrid": deepseek_vl_hybrid,
    "deepseek_vl_v2": deepseek_vl2,
    "donut": donut,
    "dots3_note": dots3_note,
    "dots_ocr": dots_ocr,
    "dots_vlm": dots_ocr,
    "embedding_gemma2": gemma4,
    "eagle_2_5_vl": eagle2_5,
    "ernie4_5_moe_vl": ernie4_5_vl,
    "ernie4_5_vl_moe": ernie4_5_vl,
    "exaone4_5": exaone4_5,
    "fast_vlm": fast_vlm,
    "florence2": florence2,
    "h2ovl_chat": internvl_chat,
    "hyperclovax_vision_v2": hyperclovax,
    "gemma3": gemma3,
    "gemma3n": gemma3n,
    "gemma4": gemma4,
    "gemma4_unified": gemma4_unified,
    "git": git,
    "glm4v": glm4v,
    "glm4v_moe": glm4v,
    "glm46v": glm4v,
    "glm5_next": glm5_next,
    "glm_edge_v": glm_edge,
    "glm_ocr": glm_ocr,
    "got_ocr2": got_ocr2,
    "granite4_vision": granite4_vision,
    "granite_docling": granite_docling,
    "hunyuan_vl": hunyuan_vl,
    "hy_v4_vl": hy_v4_vl,
    "idefics2": idefics2,
    "idefics3": idefics3,
    "r_vl": r_vl,
    "sarashina2_vision": sarashina2,
    "siglip": siglip_alone,
    "smolvlm": idefics3,
    "inkling2": inkling2,
    "inkling2_loop": inkling2,
    "instructblip": instruct_blip,
    "interns1": internvl,
    "interns1_pro": interns1_pro,
    "isaac": isaac,
    "internvl": internvl,
    "internvl_chat": internvl_chat,
    "janus": janus,
    "Keye": paddleocr_vl,
    "KeyeVL1_5": keye1_5,
    "kimi_k25": kimi_k25,
    "kimi_vl": kimi_k25,
    "kosmos-2": kosmos2,
    "lfm2_vl": lfm2_vl,
    "lfm3_vl": lfm3_vl,
    "lighton_ocr": pixtral,
    "Llama_Nemotron_Nano_VL": nemotron_vl,
    "llama_nemotron_vl": eagle2_5,
    "llama4": llama4,
    "llava": llava,
    "llava_next": llava_next,
    "llava_next_video": llava_next,
    "llava_onevision": llava_onevision,
    "llava_onevision2": llava_onevision2,
    "llavaonevision1_5": llava_onevision1_5,
    "locateanything": locate_anything,
    "mantis": llava,
    "minimax_m3_vl": minimax_m3,
    "mimo_v2": mimo_v2,
    "minicpm_ocr": minicpm_ocr,
    "minicpmo": minicpmv,
    "minicpmv": minicpmv,
    "minicpmv4_6": minicpmv4_6,
    "minicpmv4_7": minicpmv4_7,
    "mistral3": pixtral,
    "mistral_large4": mistral_large4,
    "mllama": mllama,
    "mobilevlm": mobilevlm,
    "modernvbert": modernvbert,
    "molmo": molmo,
    "molmo2": molmo2,
    "moondream": moondream,
    "muse_glimmer": muse,
    "muse_spark": muse,
    "nemotron_h_omni": nemotron_omni,
    "nemotron_parse": nemotron_parse,
    "nvila_lite": nvila_lite,
    "nougat": donut,
    "NVLM_D": nvlm_d,
    "opencua": opencua,
    "openpangu_vl": openpangu_vl,
    "openvla": openvla,
    "ovis2": ovis2,
    "ovis2_5": ovis2_5,
    "paddleocr_vl": paddleocr_vl,
    "paligemma": paligemma,
    "perception_lm": perception_lm,
    "pointsv1.5_chat": points,
    "phi3_v": phi3_v,
    "phi4_multimodal": phi4_multimodal,
    "phi4mm": phi4_multimodal,
    "pp_chart2table": got_ocr2,
    "pp_formulanet": formula_net,
    "qianfan_ocr": qianfan_ocr,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_omni_thinker": qwen2_5_omni,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5,
    "qwen3_omni_moe_thinker": qwen3_omni,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl,
    "qwen4_exp": qwen3_5,
    "step3": step3,
    "step3_vl": step3p7,
    "step3p7": step3p7,
    "step5_vl": step3p7,
    "phi4_siglip": phi4_siglip,
    "unlimited_ocr": deepseek_ocr,
    "video_llama_3": video_llama3,
    "pix2struct": pix2struct,
    "trocr": trocr,
    "vipllava": vipllava,
    "youtu_vl": youtu_vl,
}
"""Model kind -> the function that reads the vision tower of such a model."""
