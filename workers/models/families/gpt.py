"""GPT-2 and families of its time, which have layer norms, biases and an MLP without a gate."""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.errors import counted
from ...layers.layer_spec import LayerSpec
from ...layers.read_rope import read_rope
from ...layers.spec import ModelSpec
from ...layers.specs.norm_names import NormNames
from .common import Family, base_spec, head_dim, uniform_layers

_HEAD_NAMES = ((r"(^|\.)embed_out\.", r"\1lm_head."),)
GPT2_NAMES = (
    (r".*\.attn\.(masked_)?bias$", ""),
    (r"(^|\.)wte\.", r"\1embed_tokens."),
    (r"(^|\.)wpe\.", r"\1embed_positions."),
    (r"(^|\.)h\.(\d+)\.", r"\1layers.\2."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"(^|\.)ln_f\.", r"\1norm."),
    (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
    (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.attn\.", ".self_attn."),
    (r"\.mlp\.(c_fc|fc_in)\.", ".mlp.up_proj."),
    (r"\.mlp\.(c_proj|fc_out)\.", ".mlp.down_proj."),
)
MEGATRON_NAMES = (
    (r".*\.attention\.(masked_)?bias$", ""),
    (r"(^|\.)(embed_in|word_embeddings)\.", r"\1embed_tokens."),
    (r"(^|\.)word_embeddings_layernorm\.", r"\1embed_norm."),
    (r"(^|\.)h\.(\d+)\.", r"\1layers.\2."),
    (r"(^|\.)(ln_f|final_layer_norm)\.", r"\1norm."),
    (r"\.(self_)?attention\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.(self_)?attention\.dense\.", ".self_attn.o_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
    *_HEAD_NAMES,
)
_OPT_NAMES = (
    (r"\.out_proj\.", ".o_proj."),
    (r"(^|\.)project_in\.", r"\1embed_projection."),
    (r"(^|\.)project_out\.", r"\1head_projection."),
    (r"\.self_attn_layer_norm\.", ".input_layernorm."),
    (r"(\.\d+)\.final_layer_norm\.", r"\1.post_attention_layernorm."),
    (r"(^|\.)final_layer_norm\.", r"\1norm."),
    (r"(\.\d+)\.fc1\.", r"\1.mlp.up_proj."),
    (r"(\.\d+)\.fc2\.", r"\1.mlp.down_proj."),
)


_MPT_NAMES = (
    (r"(^|\.)wte\.", r"\1embed_tokens."),
    (r"(^|\.)blocks\.(\d+)\.", r"\1layers.\2."),
    (r"\.norm_1\.", ".input_layernorm."),
    (r"\.norm_2\.", ".post_attention_layernorm."),
    (r"(^|\.)norm_f\.", r"\1norm."),
    (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
    (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.ffn\.", ".mlp."),
)


_NORMS_OF_STREAM = NormNames(
    attention_input=None,
    attention_output="input_layernorm",
    mlp_input=None,
    mlp_output="post_attention_layernorm",
)
"""The names of norms that follow the blocks."""


def alibi_slopes(fields: ConfigFields) -> tuple[float, ...]:
    """Return the slopes of ALiBi, one per head: a geometric series, then every other element of a finer series.

    Raises:
        CheckpointError: There are more heads than the hidden size has elements.
    """
    num_heads = fields.integer("num_attention_heads", maximum=fields.integer("hidden_size"))
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2 ** (-4 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
    return tuple(slopes)


def gpt_spec(
    fields: ConfigFields, *, has_biases: bool = True, has_groups: bool = False, **differences: Any
) -> ModelSpec:
    """Return the spec of a model with layer norms and an MLP without a gate, changed by `differences`.

    If `has_groups`, several query heads may share a key/value head.
    """
    gpt: dict[str, Any] = {
        "has_gate": False,
        "norm_kind": "layer",
        "norm_bias": True,
        "qkv_bias": has_biases,
        "attention_output_bias": has_biases,
        "mlp_bias": has_biases,
    }
    size = fields.integer("intermediate_size", 4 * fields.integer("hidden_size"))
    fields = fields.with_values({"intermediate_size": size}).with_defaults(rms_norm_eps=1e-5)
    if not has_groups:
        gpt["num_kv_heads"] = fields.integer("num_attention_heads")
    if "layers" not in differences:
        gpt["layers"] = uniform_layers(fields, None)
    return base_spec(fields, **gpt | differences)


def _has_grouped_qkv(fields: ConfigFields) -> bool:
    """Return whether the rows of the fused projection are grouped by head. In GGUF files they are not."""
    return fields.boolean("has_grouped_qkv", True)


def _gpt2(fields: ConfigFields) -> ModelSpec:
    if fields.boolean("add_cross_attention", False):
        raise fields.error("add_cross_attention is not supported; use a model without it")
    return gpt2(fields)


def gpt2(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a GPT-2, whose layers may get cross attention."""
    fields = fields.with_defaults(
        hidden_act="gelu_new", tie_word_embeddings=True, max_position_embeddings=1024
    )
    return gpt_spec(
        fields,
        attention_scale=_attention_scale(fields),
        num_positions=fields.integer("max_position_embeddings"),
        # GGUF files store matrices in the usual order.
        has_transposed_matrices=fields.boolean("has_transposed_matrices", True),
        layers=_gpt2_layers(fields),
        tensor_names=GPT2_NAMES,
    )


def _gpt2_layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    """Return the layers, whose attention may be scaled by the inverse of their number (Mistral's GPT-2)."""
    layers = uniform_layers(fields, None)
    if not fields.boolean("scale_attn_by_inverse_layer_idx", False):
        return layers
    scale = _attention_scale(fields)
    return tuple(replace(layer, attention_scale=scale / i) for i, layer in enumerate(layers, 1))


def _attention_scale(fields: ConfigFields) -> float:
    return head_dim(fields) ** -0.5 if fields.boolean("scale_attn_weights", True) else 1.0


def _gpt_bigcode(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True, max_position_embeddings=1024
    )
    is_multi_query = fields.boolean("multi_query", True)
    return gpt_spec(
        fields,
        attention_scale=_attention_scale(fields),
        num_kv_heads=1 if is_multi_query else fields.integer("num_attention_heads"),
        # With a single key/value head, the rows are all queries, then the key, then the value.
        has_grouped_qkv=not is_multi_query,
        num_positions=fields.integer("max_position_embeddings"),
        tensor_names=GPT2_NAMES,
    )


def _gpt_neo(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        hidden_act="gelu_new", tie_word_embeddings=True, max_position_embeddings=2048
    )
    return gpt_spec(
        fields,
        layers=tuple(LayerSpec(None, window) for window in _gpt_neo_windows(fields)),
        attention_scale=1.0,
        qkv_bias=False,
        num_positions=fields.integer("max_position_embeddings"),
        tensor_names=((r"\.attn\.attention\.", ".attn."), *GPT2_NAMES),
    )


def _gpt_neo_windows(fields: ConfigFields) -> list[int | None]:
    """Return the window of each layer.

    `attention_types` is a list of pairs: a pattern, and how often it is repeated.
    """
    count, window = fields.layer_count("num_hidden_layers"), fields.integer("window_size", 256)
    kinds = fields.per_layer("attention_layers", count)
    if kinds is None:
        pairs = fields.get("attention_types", [[["global", "local"], 12]])
        try:
            kinds = [kind for pattern, repeats in pairs for kind in pattern * repeats]
        except (TypeError, ValueError):
            raise fields.wrong(
                "attention_types", "pairs of a pattern and a number", pairs
            ) from None
        if len(kinds) != count:
            raise fields.error(
                f"attention_types has {counted(len(kinds), 'layer')}, but num_hidden_layers is {count}"
            )
    for kind in kinds:
        if kind not in ("global", "local"):
            raise fields.error(
                f"the attention type {kind!r} is not supported; use a model without it"
            )
    return [window if kind == "local" else None for kind in kinds]


def _mpt(fields: ConfigFields) -> ModelSpec:
    attention = fields.section_or_empty("attn_config")
    for name in ("qk_ln", "prefix_lm"):
        if attention.get(name):
            raise fields.error(f"attn_config.{name} is not supported; use a model without it")
    num_heads = fields.integer("num_attention_heads")
    fields = fields.with_values({"hidden_act": "gelu", "activation": None}).with_defaults(
        tie_word_embeddings=True, max_position_embeddings=2048
    )
    return gpt_spec(
        fields,
        has_biases=False,
        norm_bias=False,
        qkv_clip=attention.optional_positive("clip_qkv") if attention.get("clip_qkv") else None,
        intermediate_size=4 * fields.integer("hidden_size"),
        attention_scale=attention.positive("softmax_scale", head_dim(fields) ** -0.5),
        alibi_slopes=_mpt_slopes(num_heads, attention.positive("alibi_bias_max", 8.0)),
        tensor_names=_MPT_NAMES,
    )


def _mpt_slopes(num_heads: int, largest: float) -> tuple[float, ...]:
    """Return MPT's slopes of ALiBi.

    If the number of heads is not a power of two, every other slope of the next power of two comes first.
    """
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2 ** (-largest * i / power) for i in range(1, power + 1)]
    if power != num_heads:
        slopes = [*slopes[1::2], *slopes[::2]]
    return tuple(slopes[:num_heads])


def _gptj(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(hidden_act="gelu_new", max_position_embeddings=2048)
    size = head_dim(fields)
    rotary_dim = fields.integer("rotary_dim", 64)
    rope = read_rope(
        fields.with_values({"partial_rotary_factor": rotary_dim / size}), size, partial=True
    )
    return gpt_spec(
        fields,
        layers=uniform_layers(fields, rope),
        rope_order="interleaved",
        is_parallel=True,
        norms=NormNames(mlp_input=None),
        qkv_bias=False,
        attention_output_bias=False,
        head_bias=True,
        tensor_names=GPT2_NAMES,
    )


def _codegen(fields: ConfigFields) -> ModelSpec:
    num_blocks = 4
    if fields.integer("num_attention_heads") % num_blocks:
        raise fields.error(f"num_attention_heads must be a multiple of {num_blocks}")
    spec = _gptj(fields.with_defaults(num_hidden_layers=28))
    names = ((r".*\.attn\.causal_mask$", ""), *spec.tensor_names)
    return replace(spec, num_qkv_blocks=num_blocks, qkv_block_order="qvk", tensor_names=names)


def _gpt_neox(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        hidden_act="gelu",
        intermediate_size=24_576,
        partial_rotary_factor=fields.positive("rotary_pct", 0.25),
        rope_theta=fields.positive("rotary_emb_base", 10_000.0),
    )
    rope = read_rope(fields, head_dim(fields), partial=True)
    has_biases = fields.boolean("attention_bias", True)
    return gpt_spec(
        fields,
        layers=uniform_layers(fields, rope),
        is_parallel=fields.boolean("use_parallel_residual", True),
        qkv_bias=has_biases,
        attention_output_bias=has_biases,
        has_grouped_qkv=_has_grouped_qkv(fields),
        tensor_names=MEGATRON_NAMES,
    )


def _xglm(fields: ConfigFields) -> ModelSpec:
    fields.require("add_cross_attention", False)
    is_scaled = fields.boolean("scale_embedding", True)
    fields = fields.with_values(
        {"num_attention_heads": fields.integer("attention_heads", 16)}
    ).with_defaults(hidden_act="gelu", tie_word_embeddings=True, max_position_embeddings=2048)
    return gpt_spec(
        fields,
        embedding_scale=math.sqrt(fields.integer("hidden_size")) if is_scaled else 1.0,
        num_positions=fields.integer("max_position_embeddings"),
        position_offset=2,
        sinusoids="by last",
        tensor_names=((r"(^|\.)layer_norm\.", r"\1norm."), *_OPT_NAMES),
    )


def _kosmos2(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the decoder of Kosmos-2 (arXiv 2306.14824), an XGLM with inner norms."""
    spec = _xglm(fields.with_values({"attention_heads": fields.integer("num_attention_heads")}))
    names = (
        (r"^(vision_model|image_to_text_projection)\..*", ""),
        (r"^text_model\.(lm_head\.|model\.)?", r"\1"),
        (r"\.inner_attn_ln\.", ".attn_sub_norm."),
        (r"\.ffn\.ffn_layernorm\.", ".mlp.ffn_sub_norm."),
        (r"\.ffn\.fc", ".fc"),
    )
    return replace(spec, has_inner_norms=True, tensor_names=(*names, *spec.tensor_names))


def _opt(fields: ConfigFields) -> ModelSpec:
    size = fields.integer("intermediate_size", 3072)
    fields = fields.with_values({"intermediate_size": size}).with_defaults(
        hidden_act="relu", tie_word_embeddings=True
    )
    fields.require("layer_norm_elementwise_affine", True)
    # Norms follow the blocks in opt-350m, whose embeddings have another size.
    norms_first = fields.boolean("do_layer_norm_before", True)
    size = fields.integer("word_embed_proj_dim", fields.integer("hidden_size"))
    is_narrow = size != fields.integer("hidden_size")
    return gpt_spec(
        fields,
        has_biases=fields.boolean("enable_bias", True),
        embedding_size=size if is_narrow else None,
        has_narrow_head=is_narrow,
        norms=NormNames() if norms_first else _NORMS_OF_STREAM,
        norms_stream=not norms_first,
        has_final_norm=norms_first and not fields.boolean("_remove_final_layer_norm", False),
        num_positions=fields.integer("max_position_embeddings"),
        position_offset=2,
        tensor_names=_OPT_NAMES,
    )


def _bloom(fields: ConfigFields) -> ModelSpec:
    if fields.boolean("apply_residual_connection_post_layernorm", False):
        raise fields.error(
            "apply_residual_connection_post_layernorm is not supported; use a model without it"
        )
    fields = fields.with_defaults(
        hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True, max_position_embeddings=2048
    )
    return gpt_spec(
        fields,
        alibi_slopes=alibi_slopes(fields),
        has_embedding_norm=True,
        has_grouped_qkv=_has_grouped_qkv(fields),
        tensor_names=MEGATRON_NAMES,
    )


def _falcon(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        hidden_act="gelu", tie_word_embeddings=True, max_position_embeddings=2048
    )
    num_heads, size = fields.integer("num_attention_heads"), head_dim(fields)
    is_new = fields.boolean("new_decoder_architecture", False)
    is_parallel = is_new or fields.boolean("parallel_attn", True)
    if is_new:
        num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    else:
        num_kv_heads = 1 if fields.boolean("multi_query", True) else num_heads
    norms = NormNames(mlp_input=None if is_parallel else "post_attention_layernorm")
    if is_new and fields.integer("num_ln_in_parallel_attn", 2) == 2:
        norms = NormNames(attention_input="ln_attn", mlp_input="ln_mlp")
    has_alibi = fields.boolean("alibi", False)
    return gpt_spec(
        fields,
        layers=uniform_layers(fields, None if has_alibi else read_rope(fields, size)),
        has_biases=fields.boolean("bias", False),
        num_kv_heads=num_kv_heads,
        alibi_slopes=alibi_slopes(fields) if has_alibi else (),
        rounds_alibi=has_alibi,
        is_parallel=is_parallel,
        norms=norms,
        has_grouped_qkv=_has_grouped_qkv(fields),
        # GGUF files have other names for the two norms.
        tensor_names=(*MEGATRON_NAMES, (r"\.input_layernorm\.", ".ln_mlp."))
        if norms.mlp_input == "ln_mlp"
        else MEGATRON_NAMES,
    )


def _persimmon(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        hidden_act="relu2", intermediate_size=16_384, partial_rotary_factor=0.5
    )
    return gpt_spec(
        fields,
        layers=uniform_layers(fields, read_rope(fields, head_dim(fields), partial=True)),
        qk_norm="head" if fields.boolean("qk_layernorm", True) else None,
        qk_norm_bias=True,
        has_grouped_qkv=_has_grouped_qkv(fields),
        tensor_names=(
            (r"\.self_attn\.query_key_value\.", ".self_attn.qkv_proj."),
            (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
            (r"\.([qk])_layernorm\.", r".\1_norm."),
            (r"(^|\.)final_layernorm\.", r"\1norm."),
            *MEGATRON_NAMES,
        ),
    )


def _biogpt(fields: ConfigFields) -> ModelSpec:
    is_scaled = fields.boolean("scale_embedding", True)
    # The field of the config with this name is not the epsilon that the norms use.
    fields = fields.with_values({"layer_norm_eps": None, "rms_norm_eps": 1e-5}).with_defaults(
        hidden_act="gelu",
        intermediate_size=4096,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    return gpt_spec(
        fields,
        embedding_scale=math.sqrt(fields.integer("hidden_size")) if is_scaled else 1.0,
        num_positions=fields.integer("max_position_embeddings"),
        position_offset=2,
        tensor_names=(
            (r"(^|\.)output_projection\.", r"\1lm_head."),
            (r"(^|\.)layer_norm\.", r"\1norm."),
            *_OPT_NAMES,
        ),
    )


def _openai_gpt(fields: ConfigFields) -> ModelSpec:
    activation = {"gelu": "gelu_new", "swish": "silu"}
    name = fields.text("afn", "gelu")
    fields = fields.with_values(
        {"hidden_act": activation.get(name, name), "intermediate_size": None}
    ).with_defaults(tie_word_embeddings=True, max_position_embeddings=512)
    return gpt_spec(
        fields,
        norms=_NORMS_OF_STREAM,
        norms_stream=True,
        has_final_norm=False,
        num_positions=fields.integer("max_position_embeddings"),
        has_transposed_matrices=True,
        tensor_names=(
            (r"(^|\.)tokens_embed\.", r"\1embed_tokens."),
            (r"(^|\.)positions_embed\.", r"\1embed_positions."),
            *GPT2_NAMES,
        ),
    )


FAMILIES = (
    Family("BioGptForCausalLM", "biogpt", _biogpt),
    Family("BloomForCausalLM", "bloom", _bloom),
    Family("CodeGenForCausalLM", "codegen", _codegen),
    Family("FalconForCausalLM", "falcon", _falcon),
    Family("GPT2LMHeadModel", "gpt2", _gpt2),
    Family("GPTBigCodeForCausalLM", "gpt_bigcode", _gpt_bigcode),
    Family("GPTNeoForCausalLM", "gpt_neo", _gpt_neo),
    Family("GPTJForCausalLM", "gptj", _gptj),
    Family("GPTNeoXForCausalLM", "gpt_neox", _gpt_neox),
    Family("MPTForCausalLM", "mpt", _mpt),
    Family("MptForCausalLM", "mpt", _mpt),
    Family("OpenAIGPTLMHeadModel", "openai-gpt", _openai_gpt),
    Family("XGLMForCausalLM", "xglm", _xglm),
    Family("Kosmos2ForConditionalGeneration", "kosmos-2", _kosmos2),
    Family("OPTForCausalLM", "opt", _opt),
    Family("PersimmonForCausalLM", "persimmon", _persimmon),
)
