"""DeepSeek-OCR 1 and 2, whose decoder is like DeepSeek-MoE, and DeepSeek-VL2."""

from __future__ import annotations

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.checkpoint.published.deepseek import OUTPUT_WINDOW
from ....layers.spec import ModelSpec
from ....layers.window import AfterPrompt
from ..common import Family
from ..experts import deepseek, has_listed_experts
from ..latent import deepseek_v2, deepseek_v3

_TOWER = (
    r"(.*\.)?((sam_model|vision|vision_model|qwen2_model|vision_tower|(multi_modal_)?projector)\..*"
    r"|view_sep[ae]rator|image_newline)$"
)


def _deepseek_ocr(fields: ConfigFields) -> ModelSpec:
    fields.require("use_mla", False, default=False)
    num_layers = fields.layer_count("num_hidden_layers")
    first = fields.integer("first_k_dense_replace", 1, minimum=0)
    is_sparse = has_listed_experts(fields, lambda i: i >= first)
    dense = [i for i in range(num_layers) if not is_sparse(i)]
    if dense != list(range(len(dense))):
        raise fields.error("mlp_layer_types must have the dense layers first")
    fields.require_all(topk_method="greedy", routed_scaling_factor=1)
    values = {"first_k_dense_replace": len(dense), "norm_topk_prob": False, "head_dim": None}
    spec = deepseek(fields.with_defaults(n_shared_experts=2).with_values(values))
    return replace(spec, tensor_names=((_TOWER, ""), *spec.tensor_names))


def _unlimited_ocr(fields: ConfigFields) -> ModelSpec:
    """Return the spec of Unlimited-OCR, whose output tokens attend to the prompt and to the last output tokens."""
    spec = _deepseek_ocr(fields)
    window = AfterPrompt(fields.integer(OUTPUT_WINDOW))
    return replace(spec, layers=tuple(replace(layer, window=window) for layer in spec.layers))


def _deepseek_vl2(fields: ConfigFields) -> ModelSpec:
    """Return the spec of DeepSeek-VL2, whose smallest model has no latent attention."""
    if not fields.boolean("use_mla", True):
        return _deepseek_ocr(fields)
    has_bias = fields.text("topk_method", "greedy") == "noaux_tc"
    spec = deepseek_v3(fields) if has_bias else deepseek_v2(fields)
    return replace(spec, tensor_names=((_TOWER, ""), *spec.tensor_names))


FAMILIES = (
    Family("DeepseekOCRForCausalLM", "deepseek_ocr", _deepseek_ocr),
    Family("DeepseekVLV2ForCausalLM", "deepseek_vl_v2", _deepseek_vl2),
    Family("UnlimitedOcrForConditionalGeneration", "unlimited_ocr", _unlimited_ocr),
    Family("DeepseekOcr2ForConditionalGeneration", "deepseek_ocr2", _deepseek_ocr),
)
