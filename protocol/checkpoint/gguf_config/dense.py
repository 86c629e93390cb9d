"""Translate the metadata of models in which every layer has attention and one MLP."""

from typing import Any

from .fields import ModelFields, Translate
from .parts import (
    expert_fields,
    family,
    granite,
    latent_attention,
    layer_types,
    mixture,
    named,
    rope_scaling,
    rotary_axes,
    yarn_weight,
)

_LAYERS_WITH_ALIBI = 40
"""The layers of the larger Baichuan models. Their files do not say that they have ALiBi."""

_MOST_TOKENS_OF_QWEN = 8192
"""The longest texts on which models of the first Qwen with 7 and 14 billion parameters were trained."""


def _llama(fields: ModelFields) -> dict[str, Any]:
    if fields.optional_integer("expert_count"):
        size = expert_fields(fields)["moe_intermediate_size"]
        window = fields.optional_integer("attention.sliding_window")
        return mixture(fields, "Mixtral", "mixtral", intermediate_size=size, sliding_window=window)
    if window := fields.optional_integer("attention.sliding_window"):
        return {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": window,
        }
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def _qwen2(fields: ModelFields) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _qwen3(fields: ModelFields) -> dict[str, Any]:
    return _qwen2(fields) | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def _qwen2_vl(fields: ModelFields) -> dict[str, Any]:
    return _qwen2(fields) | rotary_axes(fields)


def _qwen3_vl(fields: ModelFields) -> dict[str, Any]:
    return _qwen3(fields) | rotary_axes(fields)


def _plain_llama(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of a family whose files have Llama's tensors, under another name."""
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def _baichuan(fields: ModelFields) -> dict[str, Any]:
    if fields.num_layers != _LAYERS_WITH_ALIBI:
        return _plain_llama(fields)
    return {"model_type": "baichuan", "architectures": ["BaichuanForCausalLM"]}


def _qwen(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of the first Qwen, which is a Qwen2 whose MLPs are half as wide as the file says."""
    gate = fields.gguf.tensors.get("blk.0.ffn_gate.weight")
    if gate is None:
        raise fields.error("there is no matrix 'blk.0.ffn_gate.weight'")
    # Attention to more tokens than in training would scale queries.
    length = min(fields.integer("context_length"), _MOST_TOKENS_OF_QWEN)
    sizes = {"intermediate_size": gate.shape[0], "max_position_embeddings": length}
    return _qwen2(fields) | sizes


def _pangu(fields: ModelFields) -> dict[str, Any]:
    return {
        "model_type": "PanguEmbedded",
        "architectures": ["PanguEmbeddedForCausalLM"],
        "bias": fields.has_tensor("blk.0.attn_q.bias"),
    }


def _minicpm(fields: ModelFields) -> dict[str, Any]:
    # Earlier converters leave out the constants of the first published models.
    defaults = {
        "embedding_multiplier": fields.positive("embedding_scale", 12.0),
        "residual_multiplier": fields.positive("residual_scale", 1.4 / fields.num_layers**0.5),
        "logits_scaling": fields.positive("logit_scale", fields.integer("embedding_length") / 256),
    }
    return granite(fields) | defaults


def _deci(fields: ModelFields) -> dict[str, Any]:
    kv_heads, sizes = (
        fields.of_layers("attention.head_count_kv"),
        fields.of_layers("feed_forward_length"),
    )
    if any(
        bool(n) != bool(kv)
        for n, kv in zip(fields.of_layers("attention.head_count"), kv_heads, strict=True)
    ):
        raise fields.error("layers that replace attention with a matrix are not supported")
    blocks = [
        {
            "attention": {"n_heads_in_group": fields.num_heads // heads if heads else None},
            "ffn": {"intermediate_size": size or None},
        }
        for heads, size in zip(kv_heads, sizes, strict=True)
    ]
    return {
        "model_type": "nemotron-nas",
        "architectures": ["DeciLMForCausalLM"],
        "block_configs": blocks,
    }


def _mpt(fields: ModelFields) -> dict[str, Any]:
    attention = {
        "alibi_bias_max": fields.positive("attention.max_alibi_bias", 8.0),
        "clip_qkv": fields.optional_number("attention.clamp_kqv"),
    }
    return family(fields, "mpt", "MPTForCausalLM", attn_config=attention)


def _exaone4(fields: ModelFields) -> dict[str, Any]:
    has_windows = fields.optional_integer("attention.sliding_window") is not None
    kinds = layer_types(fields, default_period=4 if has_windows else 1)
    return family(fields, "exaone4", "Exaone4ForCausalLM", layer_types=kinds)


def _glm4(fields: ModelFields) -> dict[str, Any]:
    return family(fields, "glm4", "Glm4ForCausalLM", **_qkv_bias(fields))


def _qkv_bias(fields: ModelFields) -> dict[str, bool]:
    return {"attention_bias": fields.has_tensor("blk.0.attn_q.bias")}


def _seed_oss(fields: ModelFields) -> dict[str, Any]:
    output_bias = fields.has_tensor("blk.0.attn_output.bias")
    return family(fields, "seed_oss", "SeedOssForCausalLM", attention_out_bias=output_bias)


def _command_r(fields: ModelFields) -> dict[str, Any]:
    has_norms = fields.has_tensor("blk.0.attn_q_norm.weight")
    return family(fields, "cohere", "CohereForCausalLM", use_qk_norm=has_norms)


def _cohere2(fields: ModelFields) -> dict[str, Any]:
    kinds = layer_types(fields, default_period=4)
    return family(fields, "cohere2", "Cohere2ForCausalLM", layer_types=kinds)


def _stablelm(fields: ModelFields) -> dict[str, Any]:
    return family(
        fields,
        "stablelm",
        "StableLmForCausalLM",
        use_parallel_residual=fields.boolean("use_parallel_residual", False),
        use_qkv_bias=fields.has_tensor("blk.0.attn_q.bias"),
        qk_layernorm=fields.has_tensor("blk.0.attn_q_norm.weight"),
    )


def _falcon(fields: ModelFields) -> dict[str, Any]:
    num_kv_heads = fields.integer("attention.head_count_kv", fields.num_heads)
    return family(
        fields,
        "falcon",
        "FalconForCausalLM",
        hidden_act="gelu",
        has_grouped_qkv=False,
        multi_query=num_kv_heads == 1,
        new_decoder_architecture=1 < num_kv_heads < fields.num_heads,
        num_ln_in_parallel_attn=2 if fields.has_tensor("blk.0.attn_norm_2.weight") else 1,
    )


def _gptneox(fields: ModelFields) -> dict[str, Any]:
    return family(
        fields,
        "gpt_neox",
        "GPTNeoXForCausalLM",
        hidden_act="gelu",
        has_grouped_qkv=False,
        attention_bias=fields.has_tensor("blk.0.attn_output.bias"),
        use_parallel_residual=fields.boolean("use_parallel_residual", True),
    )


def _phi3(fields: ModelFields) -> dict[str, Any]:
    rotary_dim = fields.integer("rope.dimension_count", fields.head_dim)
    return {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "partial_rotary_factor": rotary_dim / fields.head_dim,
        "original_max_position_embeddings": fields.integer(
            "rope.scaling.original_context_length", fields.integer("context_length")
        ),
        "sliding_window": fields.optional_integer("attention.sliding_window"),
    }


def _smollm3(fields: ModelFields) -> dict[str, Any]:
    return {
        "model_type": "smollm3",
        "architectures": ["SmolLM3ForCausalLM"],
        "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(fields.num_layers)],
        "no_rope_layer_interval": 4,
    }


def _olmo(fields: ModelFields) -> dict[str, Any]:
    clip = fields.optional_positive("attention.clamp_kqv")
    return family(fields, "olmo", "OlmoForCausalLM", clip_qkv=clip)


def _olmo2(fields: ModelFields) -> dict[str, Any]:
    if window := fields.optional_integer("attention.sliding_window"):
        return {
            "model_type": "olmo3",
            "architectures": ["Olmo3ForCausalLM"],
            "sliding_window": window,
            "layer_types": layer_types(fields, default_period=4),
        }
    return {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}


def _granite_swa(fields: ModelFields) -> dict[str, Any]:
    rotates, pattern = [1] * fields.num_layers, "attention.rope_pattern"
    if fields.get(pattern) is not None:
        rotates = fields.of_layers(pattern)
    theta = fields.positive("rope.freq_base", 10_000.0)
    names = {"model_type": "granite_swa", "architectures": ["GraniteSWAForCausalLM"]}
    if fields.optional_integer("expert_count"):
        size = expert_fields(fields)["moe_intermediate_size"]
        names = mixture(fields, "GraniteMoeSWA", "granitemoe_swa", intermediate_size=size)
    return granite(fields) | {
        **names,
        "sliding_window": fields.integer("attention.sliding_window", 128),
        "layer_types": layer_types(fields, default_period=4),
        # A base of 0 means no rotation.
        "layer_rope_theta": [theta if rotated else 0 for rotated in rotates],
    }


def _bitnet(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of a BitNet. The files of bitnet.cpp are of another architecture, with squared ReLUs."""
    is_published = fields.prefix == "bitnet-b1.58."
    return {
        "model_type": "bitnet",
        "architectures": ["BitNetForCausalLM"],
        "hidden_act": "relu2" if is_published else "silu",
    }


def _apertus(fields: ModelFields) -> dict[str, Any]:
    return family(
        fields,
        "apertus",
        "ApertusForCausalLM",
        hidden_act="xielu",
        # "default" scales nothing. Without it, the family's own scaling would apply.
        rope_scaling=rope_scaling(fields) or {"rope_type": "default"},
    )


def _mistral3(fields: ModelFields) -> dict[str, Any]:
    scaling = rope_scaling(fields)
    if scaling is not None and (weight := yarn_weight(fields, 1.0)):
        scaling |= {"mscale": weight, "mscale_all_dim": weight}
    if scaling is not None and (beta := fields.optional_positive("attention.temperature_scale")):
        scaling["llama_4_scaling_beta"] = beta
    return family(fields, "ministral3", "Ministral3ForCausalLM", rope_scaling=scaling)


def _muse_glimmer(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of a Muse Glimmer. Its files have the factor of queries as the weights of a norm."""
    kinds = layer_types(fields, default_period=4)
    theta = fields.positive("rope.freq_base", 10_000.0)
    return {
        "model_type": "muse_glimmer",
        "architectures": ["MuseGlimmerForConditionalGeneration"],
        "layer_types": kinds,
        "layer_rope_theta": [theta if kind == "sliding_attention" else 0.0 for kind in kinds],
        "sliding_window": fields.optional_integer("attention.sliding_window"),
        "qk_scale_factor": fields.floats("blk.0.attn_q_norm.weight")[0],
        "output_multiplier": fields.positive("logit_scale"),
        "final_logit_softcapping": fields.positive("final_logit_softcapping"),
    }


def _chatglm(fields: ModelFields) -> dict[str, Any]:
    has_biases = any(fields.has_tensor(f"blk.0.{x}.bias") for x in ("attn_qkv", "attn_q"))
    return family(fields, "glm", "GlmForCausalLM", attention_bias=has_biases)


def _starcoder(fields: ModelFields) -> dict[str, Any]:
    return family(
        fields,
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        hidden_act="gelu_pytorch_tanh",
        multi_query=fields.integer("attention.head_count_kv", 1) < fields.num_heads,
        has_grouped_qkv=False,
    )


def _minicpm3(fields: ModelFields) -> dict[str, Any]:
    return {
        "model_type": "minicpm3",
        "architectures": ["MiniCPM3ForCausalLM"],
        # Constants of the only published model of this architecture.
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        **latent_attention(fields),
    }


DENSE: dict[str, Translate] = {
    "apertus": _apertus,
    "arcee": named(family, "arcee", "ArceeForCausalLM", hidden_act="relu2"),
    "baichuan": _baichuan,
    "bitnet": _bitnet,
    "bitnet-b1.58": _bitnet,
    "bloom": named(
        family, "bloom", "BloomForCausalLM", hidden_act="gelu_pytorch_tanh", has_grouped_qkv=False
    ),
    "chatglm": _chatglm,
    "cohere2": _cohere2,
    "command-r": _command_r,
    "deci": _deci,
    "ernie4_5": named(family, "ernie4_5", "Ernie4_5ForCausalLM"),
    "exaone": named(family, "exaone", "ExaoneForCausalLM"),
    "exaone4": _exaone4,
    "falcon": _falcon,
    "glm4": _glm4,
    "gpt2": named(
        family, "gpt2", "GPT2LMHeadModel", hidden_act="gelu_new", has_transposed_matrices=False
    ),
    "gptneox": _gptneox,
    "granite": granite,
    "granite_swa": _granite_swa,
    "hunyuan-dense": named(family, "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
    # Files of models with images: their text.
    "hunyuan_vl": named(family, "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
    "internlm2": _plain_llama,
    "jais2": named(family, "jais2", "Jais2ForCausalLM", hidden_act="relu2"),
    "llama": _llama,
    "minicpm": _minicpm,
    "minicpm3": _minicpm3,
    "mistral3": _mistral3,
    "mpt": _mpt,
    "muse-glimmer": _muse_glimmer,
    "nemotron": named(family, "nemotron", "NemotronForCausalLM", hidden_act="relu2"),
    "olmo": _olmo,
    "olmo2": _olmo2,
    "orion": named(family, "orion", "OrionForCausalLM"),
    "pangu-embedded": _pangu,
    "paddleocr": _plain_llama,
    "phi2": named(family, "phi", "PhiForCausalLM", hidden_act="gelu_new"),
    "phi3": _phi3,
    "qwen": _qwen,
    "qwen2": _qwen2,
    "qwen2vl": _qwen2_vl,
    "qwen3": _qwen3,
    "qwen3vl": _qwen3_vl,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder": _starcoder,
    "starcoder2": named(
        family, "starcoder2", "Starcoder2ForCausalLM", hidden_act="gelu_pytorch_tanh"
    ),
    "xverse": _plain_llama,
}
