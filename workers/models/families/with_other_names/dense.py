"""Families without experts whose configs and tensors have names of their own."""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.layer_spec import LayerSpec
from ....layers.read_rope import read_rope, read_rope_of_layer_type
from ....layers.rope import TIME_AXIS
from ....layers.spec import ModelSpec
from ....layers.specs.norm_names import NormNames
from ....layers.specs.pair_experts import PairExpertsSpec
from ....loaders.row_factors import RowFactors
from ..common import Family, head_dim, uniform_layers, windowed_layers
from ..gpt import GPT2_NAMES, alibi_slopes, gpt_spec
from ..latent import latent_spec
from ..llama import llama
from ..llama_variants import glm

_CHATGLM_NAMES = (
    (r"^transformer\.vision\..*", ""),
    (r".*\.rotary_pos_emb\.inv_freq$", ""),
    (r"(^|\.)embedding\.word_embeddings\.", r"\1embed_tokens."),
    (r"(^|\.)encoder\.final_layernorm\.", r"\1norm."),
    (r"(^|\.)encoder\.layers\.", r"\1layers."),
    (r"^(transformer\.)?output_layer\.", "lm_head."),
    (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.gate_up_proj."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
)
_QWEN_NAMES = (
    (r"(^|\.)wte\.", r"\1embed_tokens."),
    (r"(^|\.)h\.(\d+)\.", r"\1layers.\2."),
    (r"(^|\.)ln_f\.", r"\1norm."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
    (r"\.mlp\.w1\.", ".mlp.up_proj."),
    (r"\.mlp\.w2\.", ".mlp.gate_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
)
_BAICHUAN_NAMES = ((r"\.self_attn\.W_pack\.", ".self_attn.qkv_proj."),)
_CODESHELL_NAMES = ((r".*\.rotary_emb\.inv_freq$", ""), *GPT2_NAMES)
_JAIS_NAMES = (
    (r".*relative_pe\.slopes$", ""),
    (r"\.mlp\.c_fc2\.", ".mlp.gate_proj."),
    *GPT2_NAMES,
)
_OPENELM_NAMES = (
    (r"(^|\.)token_embeddings\.", r"\1embed_tokens."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.proj_1\.", ".mlp.gate_up_proj."),
    (r"\.ffn\.proj_2\.", ".mlp.down_proj."),
)
_SPARK_NAMES = (
    (r"(^|\.)embedding\.", r"\1embed_tokens."),
    (r"\.self_attn\.q_k_v_proj\.", ".self_attn.qkv_proj."),
    (r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
)
_TALKIE_NAMES = (
    (r"(^|\.)embed(\.weight)?$", r"\1embed_tokens.weight"),
    (r"(^|\.)lm_head$", r"\1lm_head.weight"),
    (r"(^|\.)lm_head_gain\.w_g$", r"\1lm_head.gain"),
    (r"(^|\.)blocks\.", r"\1layers."),
    (r"\.embed_skip\.a_g$", ".embedding_scale"),
    (r"\.attn\.head_gain\.head_g$", ".self_attn.key_scale"),
    (r"\.attn_gain\.a_g$", ".self_attn.o_proj.gain"),
    (r"\.mlp_gain\.a_g$", ".mlp.down_proj.gain"),
    (r"\.attn\.attn_(q|k|v)[a-z]+\.", r".self_attn.\1_proj."),
    (r"\.attn\.attn_resid\.", ".self_attn.o_proj."),
    (r"\.mlp\.mlp_linear\.", ".mlp.up_proj."),
    (r"\.mlp\.mlp_gate\.", ".mlp.gate_proj."),
    (r"\.mlp\.mlp_resid\.", ".mlp.down_proj."),
    # Those of GGUF files.
    (r"\.(key_scale|embedding_scale)\.weight$", r".\1"),
)
_TELECHAT2_NAMES = (
    (r"(^|\.)word_embeddings\.", r"\1embed_tokens."),
    (r"(^|\.)word_embeddings_layernorm\.", r"\1embed_norm."),
    (r"(^|\.)h\.(\d+)\.", r"\1layers.\2."),
    (r"(^|\.)ln_f\.", r"\1norm."),
    (r"\.self_attention\.query\.", ".self_attn.q_proj."),
    (r"\.self_attention\.key_value\.", ".self_attn.kv_proj."),
    (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
)
_BAICHUAN_7B_SIZE = 4096
_BAICHUAN2_VOCAB_SIZE = 125_696


def _chatglm(fields: ConfigFields) -> ModelSpec:
    """Return the spec of ChatGLM 2 and 3, and of GLM-4 in its first format."""
    if fields.get("position_encoding_2d") is not None or fields.get("inner_hidden_size"):
        raise fields.error("the first ChatGLM-6B is not supported; use ChatGLM 2 or later")
    fields.require_all(
        rmsnorm=True,
        multi_query_attention=True,
        post_layer_norm=True,
        add_bias_linear=False,
        apply_residual_connection_post_layernorm=False,
        original_rope=True,
    )
    has_biases = fields.boolean("add_qkv_bias", False)
    theta = 10_000.0 * fields.positive("rope_ratio", 1.0)
    spec = glm(
        fields.with_values({"attention_bias": has_biases, "rope_theta": theta}),
        tensor_names=_CHATGLM_NAMES,
    )
    if fields.section("vision_config") is None:
        return spec
    # All embeddings of an image have one position (GLM-4V 9B).
    return replace(spec, layers=tuple(map(_in_time, spec.layers)))


def _in_time(layer: LayerSpec) -> LayerSpec:
    """Return a layer whose rotations follow only the time of tokens with three positions."""
    if layer.rope is None:
        return layer
    axes = (TIME_AXIS,) * (layer.rope.rotary_dim // 2)
    return replace(layer, rope=replace(layer.rope, axes=axes))


def _baichuan(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Baichuan. The models with 13 billion parameters have ALiBi instead of rotations.

    Baichuan 2 divides each row of the output projection by its norm.
    """
    differences: dict[str, Any] = {}
    if fields.integer("hidden_size") != _BAICHUAN_7B_SIZE:
        differences = {"layers": uniform_layers(fields, None), "alibi_slopes": alibi_slopes(fields)}
    factors: tuple[RowFactors, ...] = ()
    is_second = fields.get("z_loss_weight") is not None
    if is_second or fields.integer("vocab_size") == _BAICHUAN2_VOCAB_SIZE:
        factors = (RowFactors(r"^lm_head\.weight$", "", normalizes=True),)
    return llama(fields, tensor_names=_BAICHUAN_NAMES, row_factors=factors, **differences)


def _first_baichuan(fields: ConfigFields) -> ModelSpec:
    return llama(fields, tensor_names=_BAICHUAN_NAMES)


def _chameleon(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Chameleon (arXiv 2405.09818), which never generates the tokens of images."""
    fields = fields.with_defaults(
        rms_norm_eps=1e-5, num_key_value_heads=fields.integer("num_attention_heads")
    )
    names = fields.section("vocabulary_map")
    images = (
        [] if names is None else [i for name, i in names.config.items() if name[:6] == "IMGIMG"]
    )
    norms = NormNames()
    if fields.boolean("swin_norm", False):
        norms = NormNames(None, "input_layernorm", None, "post_attention_layernorm")
    is_interleaved = fields.boolean("rope_interleave", False)
    return llama(
        fields,
        norms=norms,
        qk_norm="each head",
        qk_norm_bias=True,
        rope_order="interleaved" if is_interleaved else "half",
        silent_tokens=(min(images), max(images) + 1) if images else (0, 0),
        tensor_names=((r"^(model\.)?vqmodel\..*", ""),),
    )


def _codeshell(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a CodeShell, a GPT-2 with rotations and groups of query heads."""
    fields.require_all(position_embedding_type="rope", group_query_attention=True)
    num_kv_heads = fields.integer("num_key_value_heads", fields.integer("num_query_groups", 1))
    fields = fields.with_values({"num_key_value_heads": num_kv_heads}).with_defaults(
        hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True
    )
    # The published files have the head, but not the embedding, which is the same matrix.
    is_tied = fields.boolean("tie_word_embeddings", True)
    names = ((r"^lm_head\.", "transformer.embed_tokens."),) if is_tied else ()
    return gpt_spec(
        fields,
        has_groups=True,
        layers=uniform_layers(fields, read_rope(fields, head_dim(fields))),
        tensor_names=(*_CODESHELL_NAMES, *names),
    )


def _doge(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Doge (arXiv 2504.05565), which attends to all tokens of its longest text.

    In transformers, the tokens of a prompt exchange the logits of experts. Here, each token has its own, as it has in
    transformers if it is computed alone.
    """
    experts = None
    if fields.boolean("is_moe", False):
        count = fields.integer("num_experts", 16_384)
        chosen = fields.integer("num_experts_per_tok", 64, maximum=count)
        experts = PairExpertsSpec(count, chosen)
    length = fields.integer("max_position_embeddings", 2048)
    kept = fields.integer("keep_window_size", 2048)
    if kept < length:
        raise fields.wrong("keep_window_size", f"at least max_position_embeddings {length}", kept)
    size = head_dim(fields)
    rope = read_rope(fields, size)
    bias = fields.boolean("attention_bias", False)
    return llama(
        fields.with_values({"max_position_embeddings": length}),
        layers=uniform_layers(fields, rope, fields.optional_integer("sliding_window")),
        # One more element is the bias. Kernels read keys in steps of several elements.
        head_dim=size + 16,
        value_dim=size,
        attention_scale=size**-0.5,
        has_key_biases=True,
        has_stream_factors=True,
        pair_experts=experts,
        qkv_bias=bias,
        attention_output_bias=bias,
    )


def _refact(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Refact, a Llama with ALiBi, layer norms without biases, and one key/value head."""
    fields.require("multi_query", True)
    inner = fields.integer("intermediate_size", 4 * fields.integer("hidden_size"))
    fields = fields.with_values(
        {
            "intermediate_size": -(-(2 * inner // 3) // 256) * 256,
            "num_key_value_heads": 1,
            "hidden_act": "silu",
        }
    )
    return llama(
        fields.with_defaults(rms_norm_eps=1e-5, tie_word_embeddings=True),
        layers=uniform_layers(fields, None),
        norm_kind="layer",
        has_grouped_kv=True,
        alibi_slopes=alibi_slopes(fields),
        tensor_names=((r"\.attn\.(q|kv)\.", r".self_attn.\1_proj."), *GPT2_NAMES),
    )


def _jais(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the first Jais, a GPT-2 with ALiBi, gates and factors of maximal update parametrization."""
    fields.require_all(position_embedding_type="alibi", hidden_act="swiglu")
    is_by_size = fields.boolean("mup_scale_qk_dot_by_d", fields.boolean("scale_qk_dot_by_d", False))
    width = fields.positive("mup_output_alpha", 1.0) * fields.positive(
        "mup_width_scale", fields.positive("width_scale", 1.0)
    )
    embedding_scale = fields.positive(
        "mup_embeddings_scale", fields.positive("embeddings_scale", 1.0)
    )
    return gpt_spec(
        fields.with_values({"hidden_act": "silu"}).with_defaults(tie_word_embeddings=True),
        has_gate=True,
        attention_scale=head_dim(fields) ** (-1.0 if is_by_size else -0.5),
        alibi_slopes=alibi_slopes(fields),
        embedding_scale=embedding_scale,
        logits_divisor=1 / width,
        # GGUF files store matrices in the usual order.
        has_transposed_matrices=fields.boolean("has_transposed_matrices", True),
        tensor_names=_JAIS_NAMES,
    )


def _maincoder(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Maincoder, which norms queries and keys after it has rotated neighboring elements."""
    fields.require("use_qk_norm", True)
    return llama(
        fields.with_defaults(rms_norm_eps=1e-5, tie_word_embeddings=True),
        qk_norm="head",
        rotates_before_norm=True,
        rope_order="interleaved",
    )


def _openelm(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an OpenELM, whose layers have different numbers of heads and sizes of MLPs."""
    fields.require_all(normalize_qk_projections=True, ffn_with_glu=True)
    is_tied = fields.boolean("share_input_output_layers", True)
    count = fields.layer_count("num_hidden_layers")
    heads, kv_heads, sizes = (
        tuple(map(int, values))
        for values in (
            fields.positives("num_query_heads", count),
            fields.positives("num_kv_heads", count),
            _openelm_sizes(fields, count),
        )
    )
    fields = fields.with_values(
        {
            "num_attention_heads": max(heads),
            "num_key_value_heads": max(kv_heads),
            "intermediate_size": max(sizes),
            "hidden_act": fields.text("activation_fn_name", "silu").replace("swish", "silu"),
            "rope_theta": fields.positive("rope_freq_constant", 10_000.0),
            "tie_word_embeddings": is_tied,
        }
    )
    rope = read_rope(fields, head_dim(fields))
    return llama(
        fields,
        layers=tuple(
            LayerSpec(rope, num_heads=own, num_kv_heads=own_kv, intermediate_size=size)
            for own, own_kv, size in zip(heads, kv_heads, sizes, strict=True)
        ),
        qk_norm="head",
        tensor_names=_OPENELM_NAMES,
    )


def _openelm_sizes(fields: ConfigFields, count: int) -> list[int]:
    """Return the size of each layer's MLP: its factor times the hidden size, as a multiple of the divisor."""
    divisor, hidden_size = fields.integer("ffn_dim_divisor", 256), fields.integer("hidden_size")
    sizes = []
    for factor in fields.positives("ffn_multipliers", count):
        exact = factor * hidden_size
        size = max(divisor, int(exact + divisor / 2) // divisor * divisor)
        sizes.append(size + divisor if size < 0.9 * exact else size)
    return sizes


def _plm(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a PLM, which has latent attention, and MLPs with squared ReLUs instead of gates."""
    fields = fields.with_defaults(hidden_act="relu2", tie_word_embeddings=True)
    return latent_spec(fields, rope_order="interleaved", has_gate=False)


def _with_bias(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Llama whose field `bias` is about the attention's projections."""
    has_biases = fields.boolean("bias", False)
    return llama(fields, qkv_bias=has_biases, attention_output_bias=has_biases)


def _pangu(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an openPangu Embedded, whose biases have three fields."""
    has_biases = fields.boolean("attention_bias", False) or fields.boolean("bias", False)
    return llama(
        fields,
        qkv_bias=fields.boolean("qkv_bias", has_biases),
        attention_output_bias=has_biases,
    )


def _orion(fields: ConfigFields) -> ModelSpec:
    return llama(fields, norm_kind="layer", norm_bias=True)


def _qwen(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the first Qwen, limited to its trained length, beyond which it would scale queries."""
    fields.require_all(no_bias=True, rotary_pct=1.0)
    width = fields.integer("intermediate_size", minimum=2)
    length = fields.integer("seq_length", fields.integer("max_position_embeddings"))
    values = {
        # The field counts the gates as well.
        "intermediate_size": width // 2,
        "max_position_embeddings": min(length, fields.integer("max_position_embeddings")),
        "rope_theta": fields.positive("rotary_emb_base", 10_000.0),
    }
    return llama(fields.with_values(values), qkv_bias=True, tensor_names=_QWEN_NAMES)


def _spark(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Spark-X2.5, whose layers with windows have their own rotation."""
    fields = fields.with_defaults(hidden_act="gelu", sliding_window=512)
    has_gates = fields.boolean("headwise_attn_output_gate", False)
    if has_gates:
        fields.require("gate_attn_act_mode", "sigmoid")
    full, local = (
        read_rope_of_layer_type(
            fields, f"{kind}_attention", head_dim(fields), theta=10_000.0, partial=True
        )
        for kind in ("full", "sliding")
    )
    return llama(
        fields,
        layers=windowed_layers(fields, lambda _: False, local, full),
        gates_attention=has_gates,
        has_gate_projection=has_gates,
        has_head_gates=has_gates,
        has_gate_biases=has_gates and fields.boolean("attention_bias", False),
        tensor_names=_SPARK_NAMES,
    )


def _telechat2(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a TeleChat or TeleChat2.

    A model trained on longer texts than `base_seqlen` has a higher base of its frequencies.
    """
    fields.require("apply_residual_connection_post_layernorm", False)
    length = fields.integer("training_seqlen", fields.integer("max_position_embeddings", 8192))
    ratio = length / fields.integer("base_seqlen", length)
    alpha = max(1, 2 ** math.ceil(math.log2(ratio) + 1) - 1)
    size = head_dim(fields)
    theta = fields.positive("rope_theta", 10_000.0) * alpha ** (size / (size - 2))
    fields = fields.with_values(
        {"rope_theta": theta, "max_position_embeddings": length, "hidden_act": "silu"}
    )
    return llama(
        fields,
        attention_output_bias=True,
        mlp_output_bias=True,
        has_grouped_kv=True,
        has_embedding_norm=fields.boolean("embed_layernorm", False),
        tensor_names=_TELECHAT2_NAMES,
    )


def _teleflm(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Tele-FLM, a Llama with factors of maximal update parametrization."""
    if not fields.boolean("use_mup", False):
        return llama(fields)
    return llama(
        fields,
        embedding_scale=fields.positive("input_mult", 1.0),
        logits_divisor=fields.positive("mup_scale_factor", 1.0)
        / fields.positive("output_mult", 1.0),
    )


def _step1(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Step 1, the decoder of Step-Audio, which has ALiBi with square roots of distances."""
    heads = fields.integer("num_attention_groups", fields.integer("num_key_value_heads", 1))
    fields = fields.with_values({"num_key_value_heads": heads})
    return llama(
        fields,
        layers=uniform_layers(fields, None),
        alibi_slopes=alibi_slopes(fields),
        has_alibi_roots=True,
    )


def _talkie(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Talkie: a Llama whose norms have no weights, and that rotates in the other direction.

    Each layer ends with the addition of the embedding. Rotations of GGUF files have the usual direction.
    """
    heads = fields.integer("num_attention_heads")
    if fields.integer("num_key_value_heads", heads) != heads:
        raise fields.error(f"num_key_value_heads must be num_attention_heads, which is {heads}")
    spec = llama(
        fields.with_defaults(rms_norm_eps=2.0**-23),
        has_norm_weights=False,
        has_embedding_norm=True,
        qk_norm="scaled",
        adds_embeddings=True,
        logits_divisor=1 / fields.positive("logit_scale", 1.0),
        row_factors=(
            RowFactors(r"_proj\.weight$", "_proj.gain"),
            RowFactors(r"^lm_head\.weight$", "lm_head.gain"),
        ),
        tensor_names=_TALKIE_NAMES,
    )
    is_inverse = fields.boolean("rotates_inversely", True)
    return replace(spec, rope_order="swapped" if is_inverse else "half")


FAMILIES = (
    Family("AquilaForCausalLM", "aquila", llama),
    Family("AquilaModel", "aquila", llama),
    Family("BaiChuanForCausalLM", "baichuan", _first_baichuan),
    Family("BaichuanForCausalLM", "baichuan", _baichuan),
    Family("ChatGLMForConditionalGeneration", "chatglm", _chatglm),
    Family("ChatGLMModel", "chatglm", _chatglm),
    Family("GLM4VForCausalLM", "chatglm", _chatglm),
    Family("ChameleonForCausalLM", "chameleon", _chameleon),
    Family("ChameleonForConditionalGeneration", "chameleon", _chameleon),
    Family("CodeShellForCausalLM", "codeshell", _codeshell),
    Family("DogeForCausalLM", "doge", _doge),
    Family("InternLMForCausalLM", "internlm", _with_bias),
    Family("GPTRefactForCausalLM", "gpt_refact", _refact),
    Family("JAISLMHeadModel", "jais", _jais),
    Family("MaincoderForCausalLM", "maincoder", _maincoder),
    Family("OpenELMForCausalLM", "openelm", _openelm),
    Family("OrionForCausalLM", "orion", _orion),
    Family("PanguEmbeddedForCausalLM", "PanguEmbedded", _pangu),
    Family("PLMForCausalLM", "plm", _plm),
    Family("QWenLMHeadModel", "qwen", _qwen),
    Family("Spark2_5ForCausalLM", "spark2_5", _spark),
    Family("TalkieForCausalLM", "talkie", _talkie),
    Family("TeleChat2ForCausalLM", "telechat", _telechat2),
    Family("TeleChat3ForCausalLM", "telechat3", llama),
    Family("Telechat3ForCausalLM", "telechat3", llama),
    Family("TeleFLMForCausalLM", "teleflm", _teleflm),
    Family("Step1ForCausalLM", "step1", _step1),
    Family("XverseForCausalLM", "xverse", llama),
)
