"""Llama and the families that differ from it in a few properties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ....protocol.checkpoint.config_fields import ConfigFields
from ...layers.layer_spec import LayerSpec
from ...layers.read_rope import read_rope
from ...layers.rope import QueryScaling
from ...layers.spec import ModelSpec
from ...layers.specs.norm_names import NormNames
from ...loaders.tensor_names import TensorNames
from .common import (
    Family,
    attention_biases,
    base_spec,
    head_dim,
    sliding_layers,
    uniform_layers,
    windowed_layers,
)

WITHOUT_TALKER: TensorNames = ((r"^(talker|token2wav|code2wav)\..*", ""),)
"""Drops the tensors of the parts of Qwen's Omni models that speak."""


_COSMOS3_NAMES: TensorNames = (
    (r".*_quantizer\..*", ""),
    (r".*\.(add_[qkv]_proj|to_add_out|norm_added_[qk])\..*", ""),
    (r".*moe_gen.*", ""),
    (r"^(blocks|merger|patch_embed|pos_embed|deepstack_merger_list|time_embedder)\..*", ""),
    (r"^(audio_|action_)?(proj_in|proj_out|modality_embed)(\..*)?$", ""),
    (r"\.self_attn\.to_([qkv])\.", r".self_attn.\1_proj."),
    (r"\.self_attn\.to_out\.", ".self_attn.o_proj."),
    (r"\.self_attn\.norm_([qk])\.", r".self_attn.\1_norm."),
)


def llama(fields: ConfigFields, **differences: Any) -> ModelSpec:
    """Return the spec of a Llama model, changed by `differences`."""
    same: dict[str, Any] = {
        "mlp_bias": fields.boolean("mlp_bias", False),
        **attention_biases(fields),
    }
    if "layers" not in differences:
        same["layers"] = uniform_layers(fields, read_rope(fields, head_dim(fields)))
    return base_spec(fields, **same | differences)


def mistral(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Mistral model."""
    fields = fields.with_defaults(num_key_value_heads=8, sliding_window=4096)
    rope = read_rope(fields, head_dim(fields))
    return base_spec(
        fields, uniform_layers(fields, rope, fields.optional_integer("sliding_window"))
    )


def ministral(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Ministral model. Some of its layers may have windows."""
    fields = fields.with_defaults(num_key_value_heads=8, sliding_window=4096)
    rope, window = read_rope(fields, head_dim(fields)), fields.optional_integer("sliding_window")
    sliding = sliding_layers(fields, lambda _: window is not None)
    return base_spec(fields, tuple(LayerSpec(rope, window if x else None) for x in sliding))


def ministral3(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Ministral 3 model, or of the text part of a Mistral 3 model."""
    fields = fields.with_defaults(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5)
    if fields.get("model_type") == "ministral3" and fields.get("rope_scaling") is None:
        fields = fields.with_defaults(
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        )
    rope = read_rope(fields, head_dim(fields))
    window = fields.optional_integer("sliding_window")
    return base_spec(fields, uniform_layers(fields, rope, window, llama4_scaling(fields)))


def llama4_scaling(fields: ConfigFields) -> QueryScaling | None:
    """Return the scaling of queries by `llama_4_scaling_beta`, if the config has one."""
    parameters = fields.first_section("rope_parameters", "rope_scaling")
    beta = parameters.number("llama_4_scaling_beta", 0.0)
    if not beta:
        return None
    return QueryScaling(beta, parameters.integer("original_max_position_embeddings"))


def qwen_layers(
    fields: ConfigFields, default: Callable[[int], bool] | None = None
) -> tuple[LayerSpec, ...]:
    """Return the layers of a Qwen model.

    If the config does not say which layers have windows, `default` does. Without `default`, the last layers have them.
    """
    rope = read_rope(fields, head_dim(fields))
    if not fields.boolean("use_sliding_window", False):
        return uniform_layers(fields, rope)
    first_sliding = fields.integer("max_window_layers", 28, minimum=0)
    slides = default or (lambda i: i >= first_sliding)
    return windowed_layers(fields, slides, rope, rope, window=4096)


def qwen2(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Qwen2 model."""
    # The files of KORMo have this family's name, but no biases.
    has_bias = fields.boolean("has_qkv_bias", True)
    return base_spec(fields, qwen_layers(fields), qkv_bias=has_bias)


def _kormo(fields: ConfigFields) -> ModelSpec:
    names = (
        (r"\.pre_attention_layernorm\.", ".input_layernorm."),
        (r"\.pre_mlp_layernorm\.", ".post_attention_layernorm."),
    )
    return llama(fields, tensor_names=names)


def _mimo(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a MiMo model without its layers for multi-token prediction."""
    return replace(qwen2(fields), tensor_names=((r"^model\.mtp_layers\..*", ""),))


def qwen3(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Qwen3 model."""
    fields = fields.with_defaults(head_dim=128)
    return base_spec(fields, qwen_layers(fields), qk_norm="head", **attention_biases(fields))


def interleaved_axes(
    fields: ConfigFields, default: tuple[int, int, int] | None = None
) -> ConfigFields:
    """Return the fields with `mrope_interleaved` set, for a model whose rotary axes are always interleaved.

    `default` is used as mrope_section if the config has none.
    """
    if default is not None:
        fields = with_axes(fields, default)
    values = {}
    for name in ("rope_scaling", "rope_parameters"):
        section = fields.section(name)
        if section is not None and section.get("mrope_section") is not None:
            values[name] = {**section.config, "mrope_interleaved": True}
    return fields.with_values(values)


def with_axes(fields: ConfigFields, default: tuple[int, int, int]) -> ConfigFields:
    """Return the fields, with `default` as mrope_section if the config has none."""
    sections = [fields.section(name) for name in ("rope_scaling", "rope_parameters")]
    if any(section is not None and section.get("mrope_section") for section in sections):
        return fields
    own = fields.first_section("rope_parameters").config
    return fields.with_values({"rope_parameters": {**own, "mrope_section": list(default)}})


def _qwen2_5_omni(fields: ConfigFields) -> ModelSpec:
    return replace(qwen2(fields), tensor_names=WITHOUT_TALKER)


def _qwen3_vl(fields: ConfigFields) -> ModelSpec:
    spec = qwen3(interleaved_axes(fields))
    if fields.get("silent_tokens") is None:
        return spec
    first, end = fields.integers("silent_tokens")
    return replace(spec, silent_tokens=(first, end))


def _isaac(fields: ConfigFields) -> ModelSpec:
    """Return the spec of Isaac's decoder, half of whose angles follow the time."""
    part = fields.integer("head_dim", 128) // 8
    axes = {"mrope_section": [2 * part, part, part]}
    names = [name for name in ("rope_scaling", "rope_parameters") if fields.section(name)]
    own = {name: {**fields.first_section(name).config, **axes} for name in names}
    spec = qwen3(fields.with_values(own or {"rope_parameters": axes}))
    unused = r"^(model\.)?vision_embedding\..*"
    head = r"^model\.(text_model\.)?lm_head\."
    renamed = (unused, ""), (head, "lm_head."), (r"^model\.text_model\.", "model.")
    return replace(spec, tensor_names=renamed)


def _cosmos3_omni(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the part of a Cosmos 3 Omni that reads and writes text."""
    return replace(_qwen3_vl(fields), tensor_names=_COSMOS3_NAMES)


def phi3(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Phi-3 model."""
    fields = fields.with_defaults(rms_norm_eps=1e-5)
    rope = read_rope(fields, head_dim(fields), partial=True)
    window = fields.optional_integer("sliding_window")
    return base_spec(fields, uniform_layers(fields, rope, window))


def _phi3_v(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the text part of Phi-3-Vision."""
    return replace(phi3(fields), tensor_names=((r".*vision_embed_tokens\..*", ""),))


def _phi4_multimodal(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the text part of Phi-4-multimodal, without its adapters for images and audio."""
    unused = r".*(embed_tokens_extend|\.lora_[AB])\..*"
    return replace(
        phi3(fields.with_defaults(num_key_value_heads=8)),
        tensor_names=((unused, ""), (r"\.base_layer\.", ".")),
    )


def smollm3(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a SmolLM3 model."""
    fields = fields.with_defaults(tie_word_embeddings=True)
    num_layers = fields.layer_count("num_hidden_layers")
    interval = fields.integer("no_rope_layer_interval", 4)
    has_rope = fields.per_layer("no_rope_layers", num_layers)
    if has_rope is None:
        has_rope = [(i + 1) % interval != 0 for i in range(num_layers)]
    rope = read_rope(fields, head_dim(fields), theta=2_000_000.0)
    window = fields.optional_integer("sliding_window")
    # Layer types say which layers have a window, even if the config does not use one by default.
    uses_window = fields.boolean("use_sliding_window", False)
    sliding = sliding_layers(fields, lambda i: uses_window and not has_rope[i])
    layers = tuple(
        LayerSpec(rope if rotates else None, window if slides else None)
        for rotates, slides in zip(has_rope, sliding, strict=True)
    )
    return base_spec(
        fields, layers, mlp_bias=fields.boolean("mlp_bias", False), **attention_biases(fields)
    )


def olmo2(fields: ConfigFields, **differences: Any) -> ModelSpec:
    """Return the spec of an OLMo 2 model, changed by `differences`."""
    return llama(
        fields.with_defaults(rms_norm_eps=1e-5),
        norms=NormNames(
            attention_input=None,
            attention_output="post_attention_layernorm",
            mlp_input=None,
            mlp_output="post_feedforward_layernorm",
        ),
        qk_norm="full",
        **differences,
    )


def _emu3(fields: ConfigFields) -> ModelSpec:
    return llama(fields.with_defaults(rms_norm_eps=1e-5, rope_theta=1_000_000.0))


def granite(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Granite model."""
    return llama(
        fields,
        attention_scale=fields.positive("attention_multiplier", 1.0),
        embedding_scale=fields.positive("embedding_multiplier", 1.0),
        residual_multiplier=fields.positive("residual_multiplier", 1.0),
        logits_divisor=fields.positive("logits_scaling", 1.0),
    )


def _qwen3_ranking(fields: ConfigFields) -> ModelSpec:
    """Return the spec of jina-reranker-v3, a Qwen3 whose file also has the dense layers after the pooling."""
    return replace(qwen3(fields), tensor_names=((r"^(projector|lm_head)\..*", ""),))


FAMILIES = (
    Family("Cosmos3OmniForConditionalGeneration", "cosmos3_omni", _cosmos3_omni),
    Family("Emu3ForCausalLM", "emu3_text_model", _emu3),
    Family("GraniteForCausalLM", "granite", granite),
    Family("IsaacForConditionalGeneration", "isaac", _isaac),
    Family("KORMoForCausalLM", "kormo", _kormo),
    Family("LlamaForCausalLM", "llama", llama),
    Family("MiMoForCausalLM", "mimo", _mimo),
    Family("MinistralForCausalLM", "ministral", ministral),
    Family("Ministral3ForCausalLM", "ministral3", ministral3),
    Family("MistralForCausalLM", "mistral", mistral),
    Family("Mistral3ForConditionalGeneration", "mistral3", ministral3),
    Family("Olmo2ForCausalLM", "olmo2", olmo2),
    Family("KeyeForConditionalGeneration", "Keye", qwen3),
    Family("KeyeVL1_5ForConditionalGeneration", "KeyeVL1_5", qwen3),
    Family("Phi3ForCausalLM", "phi3", phi3),
    Family("Phi3VForCausalLM", "phi3_v", _phi3_v),
    Family("Phi4MMForCausalLM", "phi4mm", _phi4_multimodal),
    Family("Phi4MultimodalForCausalLM", "phi4_multimodal", _phi4_multimodal),
    Family("DotsOCRForCausalLM", "dots_ocr", qwen2),
    Family("Qwen2ForCausalLM", "qwen2", qwen2),
    Family("Qwen2_5OmniForConditionalGeneration", "qwen2_5_omni", _qwen2_5_omni),
    Family("Qwen2_5OmniModel", "qwen2_5_omni", _qwen2_5_omni),
    Family("Qwen2_5OmniThinkerForConditionalGeneration", "qwen2_5_omni_thinker", qwen2),
    Family("ColQwen2ForRetrieval", "colqwen2", qwen2),
    Family("ColQwen2", "colqwen2", qwen2),
    Family("ColQwen2_5", "colqwen2", qwen2),
    Family("ColQwen3", "colqwen3", _qwen3_vl),
    Family("OpsColQwen3Model", "ops_colqwen3", _qwen3_vl),
    Family("Qwen3VLNemotronEmbedModel", "qwen3_vl_nemotron_embed", _qwen3_vl),
    Family("JinaVLForRanking", "qwen2_vl", qwen2),
    Family("Qwen2VLForConditionalGeneration", "qwen2_vl", qwen2),
    Family("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", qwen2),
    Family("Qwen3ForCausalLM", "qwen3", qwen3),
    Family("JinaForRanking", "qwen3-ranking", _qwen3_ranking),
    Family("Qwen3VLForConditionalGeneration", "qwen3_vl", _qwen3_vl),
    Family("SmolLM3ForCausalLM", "smollm3", smollm3),
)
