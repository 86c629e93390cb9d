"""Families with Llama's layers and norms, and one or more additional mechanisms."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ....protocol.checkpoint.config_fields import ConfigFields
from ...layers.layer_spec import LayerSpec
from ...layers.read_rope import read_rope, read_rope_of_layer_type
from ...layers.rope import RopeSpec
from ...layers.spec import ModelSpec
from ...layers.specs.norm_names import NormNames
from .common import (
    Family,
    base_spec,
    head_dim,
    layer_settings,
    sliding_layers,
    uniform_layers,
    windowed_layers,
)
from .llama import granite, interleaved_axes, llama, olmo2, with_axes

_POST_NORMS = NormNames(
    attention_input=None,
    attention_output="post_attention_layernorm",
    mlp_input=None,
    mlp_output="post_feedforward_layernorm",
)

_INTERNLM2_NAMES = (
    (r"(^|\.)tok_embeddings\.", r"\1embed_tokens."),
    (r"^(language_model\.)?output\.", r"\1lm_head."),
    (r"\.attention\.wqkv\.", ".self_attn.qkv_proj."),
    (r"\.attention\.wo\.", ".self_attn.o_proj."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
)

GLM_AXES = 8, 12, 12
"""The number of frequencies per rotary axis of GLM-4.1V."""


def _apertus_1_5(fields: ConfigFields) -> ModelSpec:
    # The model reads the codes of images and audio, but never generates them.
    num_unused = fields.integer("num_unused_embeddings", 0, minimum=0)
    return replace(_apertus(fields), num_unused_embeddings=num_unused)


def _apertus(fields: ConfigFields) -> ModelSpec:
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 12_000_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    if fields.get("rope_scaling") is None:
        fields = fields.with_defaults(rope_parameters=llama3)
    return llama(
        fields.with_defaults(hidden_act="xielu", rms_norm_eps=1e-5, rope_theta=12_000_000.0),
        has_gate=False,
        qk_norm="head",
        norms=NormNames(attention_input="attention_layernorm", mlp_input="feedforward_layernorm"),
    )


def _arcee(fields: ConfigFields) -> ModelSpec:
    return llama(fields.with_defaults(hidden_act="relu2", rms_norm_eps=1e-5), has_gate=False)


def _domyn_edge(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Domyn Edge, whose layers have heads of several sizes."""
    fields.require("attention_bias", False)
    fields = fields.with_defaults(tie_word_embeddings=True)
    count = fields.layer_count("num_hidden_layers")
    is_local = [1 < i < count - 2 and (i - 2) % 4 < 3 for i in range(count)]
    kinds = fields.per_layer("position_layers", count) or [
        "rope" if x else "nope" for x in is_local
    ]
    windows = fields.per_layer("window_sizes", count) or [[1024 if x else -1, 0] for x in is_local]
    sizes = fields.per_layer("head_sizes", count)
    if sizes is None and fields.section("per_layer_config") is not None:
        same = {"head_dim": head_dim(fields)}
        sizes = [each["head_dim"] for each in layer_settings(fields, same, count)]
    if sizes is None:
        sizes = [64 if x else 256 for x in is_local]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise fields.wrong("head_sizes", "positive integers", sizes)
    layers = []
    for kind, window, size in zip(kinds, windows, sizes, strict=True):
        if kind not in ("rope", "nope"):
            raise fields.wrong("position_layers", "rope or nope for each layer", kind)
        if not _is_window(window):
            raise fields.wrong("window_sizes", "pairs of a positive number or -1 and of 0", window)
        layers.append(
            LayerSpec(
                read_rope(fields, size) if kind == "rope" else None,
                window[0] + 1 if window[0] > 0 else None,
                head_dim=size,
                attention_scale=size**-0.5,
            )
        )
    return llama(
        fields.with_values({"head_dim": sizes[0]}),
        layers=tuple(layers),
        qk_norm="keys",
        norms=NormNames(
            attention_input="pre_attention_norm",
            attention_output="post_attention_norm",
            mlp_input="pre_feedforward_norm",
            mlp_output="post_feedforward_norm",
        ),
        tensor_names=((r"\.attention\.", ".self_attn."), (r"\.feedforward\.", ".mlp.")),
    )


def _is_window(value: Any) -> bool:
    """Return whether the value is a window: the numbers of tokens before (-1 for all) and after (0) that are read."""
    if not isinstance(value, list) or len(value) != 2 or value[1] != 0:
        return False
    return type(value[0]) is int and (value[0] > 0 or value[0] == -1)


def ernie4_5(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a dense ERNIE 4.5 model."""
    fields = fields.with_defaults(
        num_key_value_heads=2,
        head_dim=128,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
    )
    has_biases = fields.boolean("use_bias", False)
    return base_spec(
        fields,
        uniform_layers(fields, read_rope(fields, head_dim(fields))),
        rope_order="interleaved",
        qkv_bias=has_biases,
        attention_output_bias=has_biases,
        mlp_bias=has_biases,
    )


def _exaone4(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(rms_norm_eps=1e-5, sliding_window=4096)
    rope, window = read_rope(fields, head_dim(fields)), fields.optional_integer("sliding_window")
    pattern = fields.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:
        # The pattern has one letter per layer; "L" means a window.
        sliding = sliding_layers(fields, lambda i: pattern[i % len(pattern)] == "L")
    else:
        period = fields.integer("sliding_window_pattern", 4, minimum=0)
        sliding = sliding_layers(fields, lambda i: bool(window and period and (i + 1) % period))
    # In models with windows, layers without one have no position encoding.
    layers = tuple(
        LayerSpec(rope, window) if slides else LayerSpec(rope if window is None else None)
        for slides in sliding
    )
    return base_spec(fields, layers, norms=_POST_NORMS, qk_norm="head")


def _exaone(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(rms_norm_eps=1e-5, rope_theta=500_000.0)
    return llama(
        fields,
        tensor_names=(
            (r"(^|\.)wte\.", r"\1embed_tokens."),
            (r"(^|\.)h\.(\d+)\.", r"\1layers.\2."),
            (r"(^|\.)ln_f\.", r"\1norm."),
            (r"\.ln_1\.", ".input_layernorm."),
            (r"\.ln_2\.", ".post_attention_layernorm."),
            (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
            (r"\.attn\.attention\.", ".self_attn."),
            (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
            (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
            (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
        ),
    )


def glm(fields: ConfigFields, **differences: Any) -> ModelSpec:
    """Return the spec of a GLM, changed by `differences`."""
    fields = fields.with_defaults(
        num_key_value_heads=2, head_dim=128, rms_norm_eps=1.5625e-7, partial_rotary_factor=0.5
    )
    return base_spec(
        fields,
        uniform_layers(fields, read_rope(fields, head_dim(fields), partial=True)),
        # GGUF files of models that read images have another order.
        rope_order="half" if fields.boolean("has_halved_rotation", False) else "interleaved",
        qkv_bias=fields.boolean("attention_bias", True),
        **differences,
    )


def _glm4(fields: ConfigFields) -> ModelSpec:
    norms = NormNames(attention_output="post_self_attn_layernorm", mlp_output="post_mlp_layernorm")
    return glm(fields, norms=norms)


def _glm4_images(fields: ConfigFields) -> ModelSpec:
    fields = with_axes(fields, GLM_AXES).with_defaults(rms_norm_eps=1e-5)
    size = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    return _glm4(fields.with_values({"head_dim": size, "attention_bias": True}))


def _glm_ocr(fields: ConfigFields) -> ModelSpec:
    """Return the spec of GLM-OCR, whose head size may differ from GLM-4.1V's."""
    fields = with_axes(fields, GLM_AXES).with_defaults(
        head_dim=head_dim(fields),
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        partial_rotary_factor=1.0,
    )
    return _glm4(fields.with_values({"attention_bias": False}))


def _helium(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(head_dim=128, rms_norm_eps=1e-8, rope_theta=100_000.0)
    return base_spec(
        fields,
        uniform_layers(fields, read_rope(fields, head_dim(fields))),
        rope_order="interleaved",
        qkv_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
    )


def hunyuan(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a dense Hunyuan model."""
    scaling = fields.first_section("rope_parameters", "rope_scaling")
    alpha = scaling.number("alpha", 0.0)
    if alpha and "dynamic" in (scaling.get("rope_type"), scaling.get("type")):
        # A fixed NTK-aware scaling: the rotary base for sequences `alpha` times as long.
        size = head_dim(fields)
        if size <= 2:
            raise fields.error(f"head_dim must be above 2, got {size}")
        theta = scaling.positive("rope_theta", fields.positive("rope_theta", 10_000.0))
        theta *= alpha ** (size / (size - 2))
        axes = scaling.get("mrope_section")
        parameters = {"rope_type": "default", "rope_theta": theta, "mrope_section": axes}
        fields = fields.with_values({"rope_parameters": parameters, "rope_scaling": None})
    return llama(
        fields.with_defaults(rms_norm_eps=1e-5),
        qk_norm="head",
        rotates_before_norm=True,
        tensor_names=((r"\.query_layernorm\.", ".q_norm."), (r"\.key_layernorm\.", ".k_norm.")),
    )


def _hunyuan_vl(fields: ConfigFields) -> ModelSpec:
    """Return the spec of Hunyuan-OCR's decoder, whose rotary positions have four axes (XD-RoPE)."""
    values = {}
    for name in ("rope_parameters", "rope_scaling"):
        if (section := fields.section(name)) is not None:
            found = dict(section.config)
            axes = found.pop("xdrope_section", None)
            kinds = {key: "dynamic" for key in ("rope_type", "type") if found.get(key) == "xdrope"}
            values[name] = {"mrope_section": axes} | found | kinds
    return hunyuan(fields.with_values(values).with_defaults(tie_word_embeddings=True))


def _hyperclovax(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(attention_multiplier=head_dim(fields) ** -0.5)
    spec = granite(fields)
    norms = NormNames()
    if fields.boolean("use_post_norm", True):
        norms = NormNames(attention_output="post_norm1", mlp_output="post_norm2")
    return replace(spec, logits_divisor=1 / spec.logits_divisor, norms=norms)


def _internlm3(fields: ConfigFields) -> ModelSpec:
    # The model's own config has one field for queries, keys and values, and one for all other projections.
    has_biases = fields.boolean("bias", fields.boolean("attention_bias", False))
    return llama(
        fields.with_defaults(num_key_value_heads=2, head_dim=128, rms_norm_eps=1e-5),
        qkv_bias=fields.boolean("qkv_bias", fields.boolean("attention_bias", False)),
        attention_output_bias=has_biases,
        mlp_bias=fields.boolean("bias", fields.boolean("mlp_bias", False)),
    )


def _internlm2(fields: ConfigFields) -> ModelSpec:
    has_biases = fields.boolean("bias", False)
    return llama(
        fields,
        qkv_bias=has_biases,
        attention_output_bias=has_biases,
        has_grouped_qkv=True,
        tensor_names=_INTERNLM2_NAMES,
    )


def _internlm2_ve(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the text of an InternLM2 that has further MLPs for the tokens of images."""
    spec = _internlm2(fields)
    return replace(spec, tensor_names=((r".*\.feed_forward_ve\..*", ""), *spec.tensor_names))


def minicpm(fields: ConfigFields, **differences: Any) -> ModelSpec:
    """Return the spec of MiniCPM 1, 2 and 4, which have Granite's multipliers under other names."""
    if fields.integer("num_experts", 0, minimum=0):
        raise fields.error("num_experts is not supported for this family; use a model without it")
    width = fields.integer("hidden_size") / fields.positive("dim_model_base", 1.0)
    depth = fields.layer_count("num_hidden_layers") ** 0.5
    return llama(
        fields.with_defaults(tie_word_embeddings=True),
        embedding_scale=fields.positive("scale_emb", 1.0),
        residual_multiplier=fields.positive("scale_depth", 1.0) / depth,
        logits_divisor=width,
        **differences,
    )


def _deci(fields: ConfigFields) -> ModelSpec:
    """Return the spec of Llama-Nemotron, whose layers differ in size or lack attention or MLP (arXiv 2411.19146)."""
    rope, num_heads = read_rope(fields, head_dim(fields)), fields.integer("num_attention_heads")
    count, hidden_size = fields.layer_count("num_hidden_layers"), fields.integer("hidden_size")
    kv_heads = fields.per_layer("num_key_value_heads_per_layer", count)
    blocks = fields.per_layer("block_configs", count)
    if blocks is None:
        if kv_heads is None:
            raise fields.error(
                "block_configs or num_key_value_heads_per_layer must list the layers"
            )
        layers = [LayerSpec(rope, num_kv_heads=heads) for heads in kv_heads]
    else:
        layers = [
            _deci_layer(ConfigFields(block, fields.path), rope, num_heads, hidden_size)
            for block in blocks
        ]
    sizes = [layer.intermediate_size for layer in layers if layer.intermediate_size]
    heads = [layer.num_kv_heads for layer in layers if layer.num_kv_heads]
    if not heads:
        raise fields.error(
            "no layer has attention; models without attention are not supported; use another one"
        )
    widest = {"num_key_value_heads": max(heads)}
    if sizes:
        widest["intermediate_size"] = max(sizes)
    return llama(fields.with_values(widest), layers=tuple(layers))


def _deci_layer(
    block: ConfigFields, rope: RopeSpec | None, num_heads: int, hidden_size: int
) -> LayerSpec:
    attention, mlp = block.required_section("attention"), block.required_section("ffn")
    if attention.get("replace_with_linear") or mlp.get("replace_with_linear"):
        raise block.error("replace_with_linear is not supported; use a model without it")
    group, size = (
        attention.optional_integer("n_heads_in_group"),
        mlp.optional_integer("intermediate_size"),
    )
    if size is None and (factor := mlp.optional_positive("ffn_mult")) is not None:
        # Two thirds of the factor, as in the first Llama, in units of 256.
        size = -(-int(2 * factor * hidden_size / 3) // 256) * 256
    return LayerSpec(
        rope if group else None,
        attends=group is not None,
        num_kv_heads=num_heads // group if group else None,
        has_mlp=size is not None,
        intermediate_size=size,
    )


def _iquest_coder(fields: ConfigFields) -> ModelSpec:
    if fields.get("clip_qkv") is not None or fields.boolean("use_sliding_window", False):
        raise fields.error(
            "clip_qkv and use_sliding_window are not supported for this family; use a model without them"
        )
    return llama(fields.with_defaults(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5))


def _nanochat(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(hidden_act="relu2", final_logit_softcapping=15.0)
    return llama(
        fields,
        has_gate=False,
        has_norm_weights=False,
        has_embedding_norm=True,
        # Rotation does not change the result of a norm without weights, unless it also scales.
        qk_norm="head",
        rotates_before_norm=True,
        rope_order="swapped",
        final_softcap=fields.optional_positive("final_logit_softcapping"),
        tensor_names=((r"\.mlp\.fc1\.", ".mlp.up_proj."), (r"\.mlp\.fc2\.", ".mlp.down_proj.")),
    )


def _olmo3(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(sliding_window=4096, rope_theta=500_000.0)
    local, full = (
        read_rope_of_layer_type(fields, kind, head_dim(fields), theta=500_000.0)
        for kind in ("sliding_attention", "full_attention")
    )
    layers = windowed_layers(fields, lambda i: bool((i + 1) % 4), local, full)
    return olmo2(fields, layers=layers)


def _cosmos3_edge(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the part of a Cosmos 3 Edge that reads and writes text."""
    fields = fields.with_defaults(hidden_act="relu2", rms_norm_eps=1e-5, num_key_value_heads=8)
    fields = fields.with_defaults(head_dim=128)
    return llama(
        interleaved_axes(fields, (24, 20, 20)),
        has_gate=False,
        tensor_names=(
            (r"^(model\.)?(visual|projector)\..*", ""),
            (r"^(.*\.)?(action_|time_|proj_in|proj_out|norm_moe_gen).*", ""),
            (
                r".*(_moe_gen|\.add_[qkv]_proj|\.to_add_out|\.norm_added_[qk]|\.k_norm_und_for_gen)\..*",
                "",
            ),
            (r"\.self_attn\.to_([qkv])\.", r".self_attn.\1_proj."),
            (r"\.self_attn\.to_out\.", ".self_attn.o_proj."),
            (r"\.mlp\.fc1\.", ".mlp.up_proj."),
            (r"\.mlp\.fc2\.", ".mlp.down_proj."),
        ),
    )


def _paddleocr_vl(fields: ConfigFields) -> ModelSpec:
    """Return the spec of PaddleOCR-VL, which is ERNIE 4.5 with Qwen2-VL's rotation."""
    rope = with_axes(fields.with_defaults(num_key_value_heads=2), (16, 24, 24))
    return replace(ernie4_5(rope), rope_order="half")


def _seed_oss(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(num_key_value_heads=8, head_dim=128, attention_bias=True)
    return llama(fields, attention_output_bias=fields.boolean("attention_out_bias", False))


def _bitnet(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(rms_norm_eps=1e-5, hidden_act="relu2")
    rope = read_rope(fields, head_dim(fields), theta=500_000.0)
    return llama(fields, layers=uniform_layers(fields, rope), has_inner_norms=True)


def _old_bitnet(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a BitNet of 1bitLLM, a Llama whose attention and MLP have inner norms."""
    return llama(
        fields,
        has_inner_norms=True,
        tensor_names=(
            (r"\.inner_attn_ln\.", ".attn_sub_norm."),
            (r"\.ffn_layernorm\.", ".ffn_sub_norm."),
        ),
    )


FAMILIES = (
    Family("BitNetForCausalLM", "bitnet", _bitnet),
    Family("BitnetForCausalLM", "bitnet", _old_bitnet),
    Family("ApertusForCausalLM", "apertus", _apertus),
    Family("Apertus1p5ForConditionalGeneration", "apertus1p5", _apertus_1_5),
    Family("Apertus1p5TextForCausalLM", "apertus1p5_text", _apertus_1_5),
    Family("ArceeForCausalLM", "arcee", _arcee),
    Family("DomynEdgeForCausalLM", "domynedge", _domyn_edge),
    Family("Ernie4_5ForCausalLM", "ernie4_5", ernie4_5),
    Family("ExaoneForCausalLM", "exaone", _exaone),
    Family("Exaone4ForCausalLM", "exaone4", _exaone4),
    Family("Glm4ForCausalLM", "glm4", _glm4),
    Family("GlmForCausalLM", "glm", glm),
    Family("Glm46VForConditionalGeneration", "glm46v", _glm4_images),
    Family("Glm4vForConditionalGeneration", "glm4v", _glm4_images),
    Family("GlmOcrForConditionalGeneration", "glm_ocr", _glm_ocr),
    Family("HeliumForCausalLM", "helium", _helium),
    Family("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", hunyuan),
    Family("HunYuanVLForConditionalGeneration", "hunyuan_vl", _hunyuan_vl),
    Family("HyperCLOVAXForCausalLM", "hyperclovax", _hyperclovax),
    Family("DeciLMForCausalLM", "nemotron-nas", _deci),
    Family("InternLM2VEForCausalLM", "internlm2_ve", _internlm2_ve),
    Family("InternLM2ForCausalLM", "internlm2", _internlm2),
    Family("InternLM3ForCausalLM", "internlm3", _internlm3),
    Family("IQuestCoderForCausalLM", "iquestcoder", _iquest_coder),
    Family("MiniCPMForCausalLM", "minicpm", minicpm),
    Family("NanoChatForCausalLM", "nanochat", _nanochat),
    Family("Olmo3ForCausalLM", "olmo3", _olmo3),
    Family("Cosmos3EdgeForConditionalGeneration", "cosmos3_edge", _cosmos3_edge),
    Family("PaddleOCRVLForConditionalGeneration", "paddleocr_vl", _paddleocr_vl),
    Family("SeedOssForCausalLM", "seed_oss", _seed_oss),
)
