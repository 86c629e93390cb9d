"""Translate the metadata of models in which every layer has attention and one MLP."""

from typing import Any, Final

import numpy as np

from .declared import boolean, declared, expert, has, integer, optional_integer, positive, windows
from .fields import ModelFields, Translate
from .parts import (
    denoising,
    expert_fields,
    family,
    granite,
    latent_attention,
    layer_counts,
    layer_types,
    optional_axes,
    partial_rotary,
    rope_scaling,
    ropes_by_type,
    rotary_axes,
    rotary_dim,
    yarn_weight,
)

_LAYERS_WITH_ALIBI = 40
"""The layers of the larger Baichuan models. Their files do not say that they have ALiBi."""

_MOST_TOKENS_OF_QWEN = 8192
"""The longest texts on which models of the first Qwen with 7 and 14 billion parameters were trained."""

_WINDOW: Final = optional_integer("attention.sliding_window")
_PLAIN_LLAMA: Final = declared("llama", "LlamaForCausalLM")
"""A family whose files have Llama's tensors, under another name."""

_MISTRAL: Final = declared("mistral", "MistralForCausalLM", sliding_window=_WINDOW)
_MIXTRAL: Final = declared(
    "mixtral",
    "MixtralForCausalLM",
    expert_fields,
    intermediate_size=expert("moe_intermediate_size"),
    sliding_window=_WINDOW,
)
_NO_WINDOW: Final = {"use_sliding_window": False, "sliding_window": None}
_QWEN2: Final = declared(
    "qwen2", "Qwen2ForCausalLM", has_qkv_bias=has("blk.0.attn_q.bias"), **_NO_WINDOW
)
_OLMO2: Final = declared("olmo2", "Olmo2ForCausalLM")
_OLMO3: Final = declared(
    "olmo3", "Olmo3ForCausalLM", sliding_window=_WINDOW, layer_types=windows(4)
)


def _scaled_axes(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of Hunyuan's rotary positions with four coordinates, whose base is scaled."""
    sections = fields.config.get(fields.prefix + "rope.dimension_sections")
    if sections is None:
        return {}
    if not isinstance(sections, np.ndarray) or sections.dtype.kind not in "iu":
        raise fields.wrong("rope.dimension_sections", "a list of integers", sections)
    alpha = fields.number("rope.scaling.alpha", 0.0)
    scaling = {
        "rope_type": "dynamic" if alpha else "default",
        "alpha": alpha,
        "mrope_section": [int(size) for size in sections],
    }
    return {"rope_scaling": scaling}


_HUNYUAN: Final = declared("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", family)
_HUNYUAN_VL: Final = declared("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", family, _scaled_axes)


def _llama(fields: ModelFields) -> dict[str, Any]:
    if fields.optional_integer("expert_count"):
        return _MIXTRAL(fields)
    return (_MISTRAL if _WINDOW(fields) else _PLAIN_LLAMA)(fields)


def _olmo2(fields: ModelFields) -> dict[str, Any]:
    return (_OLMO3 if _WINDOW(fields) else _OLMO2)(fields)


def _baichuan(fields: ModelFields) -> dict[str, Any]:
    if fields.num_layers != _LAYERS_WITH_ALIBI:
        return _PLAIN_LLAMA(fields)
    return {"model_type": "baichuan", "architectures": ["BaichuanForCausalLM"]}


def _glm_axes(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of a decoder that reads images. The converter then orders the rotated elements by halves."""
    axes = optional_axes(fields)
    return axes and {**axes, "has_halved_rotation": True}


def _qwen_sizes(fields: ModelFields) -> dict[str, Any]:
    """Return the sizes of the first Qwen, which is a Qwen2 whose MLPs are half as wide as the file says."""
    gate = fields.gguf.tensors.get("blk.0.ffn_gate.weight")
    if gate is None:
        raise fields.error("there is no matrix 'blk.0.ffn_gate.weight'")
    # Attention to more tokens than in training would scale queries.
    length = min(fields.integer("context_length"), _MOST_TOKENS_OF_QWEN)
    return {"intermediate_size": gate.shape[0], "max_position_embeddings": length}


def _minicpm_factors(fields: ModelFields) -> dict[str, Any]:
    # Earlier converters leave out the constants of the first published models.
    return {
        "embedding_multiplier": fields.positive("embedding_scale", 12.0),
        "residual_multiplier": fields.positive("residual_scale", 1.4 / fields.num_layers**0.5),
        "logits_scaling": fields.positive("logit_scale", fields.integer("embedding_length") / 256),
    }


def _deci_blocks(fields: ModelFields) -> list[dict[str, Any]]:
    kv_heads, sizes = (
        fields.of_layers("attention.head_count_kv"),
        fields.of_layers("feed_forward_length"),
    )
    if any(
        bool(n) != bool(kv)
        for n, kv in zip(fields.of_layers("attention.head_count"), kv_heads, strict=True)
    ):
        raise fields.error(
            "layers that replace attention with a matrix are not supported; use a model without them"
        )
    return [
        {
            "attention": {"n_heads_in_group": fields.num_heads // heads if heads else None},
            "ffn": {"intermediate_size": size or None},
        }
        for heads, size in zip(kv_heads, sizes, strict=True)
    ]


def _openelm_layers(fields: ModelFields) -> dict[str, Any]:
    size = fields.integer("embedding_length")
    return {
        "num_query_heads": fields.of_layers("attention.head_count"),
        "num_kv_heads": fields.of_layers("attention.head_count_kv"),
        "ffn_multipliers": [each / size for each in fields.of_layers("feed_forward_length")],
        "ffn_dim_divisor": 1,
    }


def _mpt_attention(fields: ModelFields) -> dict[str, Any]:
    return {
        "alibi_bias_max": fields.positive("attention.max_alibi_bias", 8.0),
        "clip_qkv": fields.optional_number("attention.clamp_kqv"),
    }


def _exaone4_layers(fields: ModelFields) -> list[str]:
    has_windows = fields.optional_integer("attention.sliding_window") is not None
    return layer_types(fields, default_period=4 if has_windows else 1)


def _falcon_heads(fields: ModelFields) -> dict[str, bool]:
    num_kv_heads = fields.integer("attention.head_count_kv", fields.num_heads)
    return {
        "multi_query": num_kv_heads == 1,
        "new_decoder_architecture": 1 < num_kv_heads < fields.num_heads,
    }


def _granite_swa(fields: ModelFields) -> dict[str, Any]:
    rotates, pattern = [1] * fields.num_layers, "attention.rope_pattern"
    if fields.get(pattern) is not None:
        rotates = fields.of_layers(pattern)
    theta = fields.positive("rope.freq_base", 10_000.0)
    names = {"model_type": "granite_swa", "architectures": ["GraniteSWAForCausalLM"]}
    if fields.optional_integer("expert_count"):
        names = _GRANITE_MOE_SWA(fields)
    return granite(fields) | {
        **names,
        "sliding_window": fields.integer("attention.sliding_window", 128),
        "layer_types": layer_types(fields, default_period=4),
        # A base of 0 means no rotation.
        "layer_rope_theta": [theta if rotated else 0 for rotated in rotates],
    }


_GRANITE_MOE_SWA: Final = declared(
    "granitemoe_swa",
    "GraniteMoeSWAForCausalLM",
    expert_fields,
    intermediate_size=expert("moe_intermediate_size"),
)


def _mistral3_scaling(fields: ModelFields) -> dict[str, Any] | None:
    scaling = rope_scaling(fields)
    if scaling is not None and (weight := yarn_weight(fields, 1.0)):
        scaling |= {"mscale": weight, "mscale_all_dim": weight}
    if scaling is not None and (beta := fields.optional_positive("attention.temperature_scale")):
        scaling["llama_4_scaling_beta"] = beta
    return scaling


def _muse_glimmer(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of a Muse Glimmer. Its files have the factor of queries as the weights of a norm."""
    kinds = layer_types(fields, default_period=4)
    theta = fields.positive("rope.freq_base", 10_000.0)
    return {
        "layer_types": kinds,
        "layer_rope_theta": [theta if kind == "sliding_attention" else 0.0 for kind in kinds],
        "qk_scale_factor": fields.floats("blk.0.attn_q_norm.weight")[0],
    }


def _hrm_stacks(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of an HRM-Text, whose file counts a layer as often as it is computed."""
    return {
        "num_hidden_layers": fields.integer("hrm.layers_per_stack"),
        "num_layers_per_stack": fields.integer("hrm.layers_per_stack"),
        "H_cycles": fields.integer("hrm.h_cycles"),
        "L_cycles": fields.integer("hrm.l_cycles"),
        "prefix_lm": fields.boolean("hrm.prefix_lm", True),
        "embedding_scale": fields.positive("embedding_scale", 1.0),
    }


def _plamo3_scaling(fields: ModelFields) -> dict[str, Any] | None:
    scaling = rope_scaling(fields)
    # The bounds of interpolated frequencies are not rounded, which files do not say.
    return scaling and scaling | {"truncate": False}


def _chatglm_bias(fields: ModelFields) -> bool:
    return any(fields.has_tensor(f"blk.0.{name}.bias") for name in ("attn_qkv", "attn_q"))


DENSE: Final[dict[str, Translate]] = {
    "apertus": declared(
        "apertus",
        "ApertusForCausalLM",
        family,
        hidden_act="xielu",
        # "default" scales nothing. Without it, the family's own scaling would apply.
        rope_scaling=lambda fields: rope_scaling(fields) or {"rope_type": "default"},
    ),
    "arcee": declared("arcee", "ArceeForCausalLM", family, hidden_act="relu2"),
    "baichuan": _baichuan,
    "bitnet": declared("bitnet", "BitNetForCausalLM", hidden_act="silu"),
    # The files of bitnet.cpp are of another architecture, with squared ReLUs.
    "bitnet-b1.58": declared("bitnet", "BitNetForCausalLM", hidden_act="relu2"),
    "bloom": declared(
        "bloom",
        "BloomForCausalLM",
        family,
        hidden_act="gelu_pytorch_tanh",
        has_grouped_qkv=False,
    ),
    "chameleon": declared(
        "chameleon",
        "ChameleonForCausalLM",
        swin_norm=boolean("swin_norm", False),
        rope_interleave=True,
        # The tokens of images, which files do not name, have the same numbers in all published models.
        vocabulary_map={"IMGIMGA": 4, "IMGIMGZ": 8195},
    ),
    "chatglm": declared("glm", "GlmForCausalLM", family, attention_bias=_chatglm_bias),
    "codeshell": declared("codeshell", "CodeShellForCausalLM", hidden_act="gelu_pytorch_tanh"),
    # The matrices for images beside those for text are not read.
    "cogvlm": _PLAIN_LLAMA,
    "cohere2": declared("cohere2", "Cohere2ForCausalLM", family, layer_types=windows(4)),
    "command-r": declared(
        "cohere", "CohereForCausalLM", family, use_qk_norm=has("blk.0.attn_q_norm.weight")
    ),
    "deci": declared("nemotron-nas", "DeciLMForCausalLM", block_configs=_deci_blocks),
    "dream": declared("Dream", "DreamModel", denoising, **_NO_WINDOW),
    "ernie4_5": declared("ernie4_5", "Ernie4_5ForCausalLM", family),
    "exaone": declared("exaone", "ExaoneForCausalLM", family),
    "exaone4": declared("exaone4", "Exaone4ForCausalLM", family, layer_types=_exaone4_layers),
    "falcon": declared(
        "falcon",
        "FalconForCausalLM",
        family,
        _falcon_heads,
        hidden_act="gelu",
        has_grouped_qkv=False,
        num_ln_in_parallel_attn=lambda fields: (
            2 if fields.has_tensor("blk.0.attn_norm_2.weight") else 1
        ),
    ),
    "glm4": declared(
        "glm4",
        "Glm4ForCausalLM",
        family,
        layer_counts,
        _glm_axes,
        attention_bias=has("blk.0.attn_q.bias"),
    ),
    "gpt2": declared(
        "gpt2", "GPT2LMHeadModel", family, hidden_act="gelu_new", has_transposed_matrices=False
    ),
    "gptneox": declared(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        family,
        hidden_act="gelu",
        has_grouped_qkv=False,
        attention_bias=has("blk.0.attn_output.bias"),
        use_parallel_residual=boolean("use_parallel_residual", True),
    ),
    "granite": declared("granite", "GraniteForCausalLM", granite),
    "granite_swa": _granite_swa,
    "hrm_text": declared("hrm_text", "HrmTextForCausalLM", _hrm_stacks),
    "hunyuan-dense": _HUNYUAN,
    # Files of models with images: their text.
    "hunyuan_vl": _HUNYUAN_VL,
    "internlm2": _PLAIN_LLAMA,
    "jais": declared(
        "jais",
        "JAISLMHeadModel",
        hidden_act="swiglu",
        mup_scale_qk_dot_by_d=True,
        has_transposed_matrices=False,
    ),
    "jais2": declared("jais2", "Jais2ForCausalLM", family, hidden_act="relu2"),
    "llada": declared("llada", "LLaDAModelLM", denoising),
    "llama": _llama,
    "maincoder": declared("maincoder", "MaincoderForCausalLM"),
    "minicpm": declared("granite", "GraniteForCausalLM", granite, _minicpm_factors),
    "minicpm3": declared(
        "minicpm3",
        "MiniCPM3ForCausalLM",
        latent_attention,
        # Constants of the only published model of this architecture.
        scale_emb=12.0,
        scale_depth=1.4,
        dim_model_base=256,
    ),
    "mistral3": declared(
        "ministral3", "Ministral3ForCausalLM", family, rope_scaling=_mistral3_scaling
    ),
    "mpt": declared("mpt", "MPTForCausalLM", family, attn_config=_mpt_attention),
    "muse-glimmer": declared(
        "muse_glimmer",
        "MuseGlimmerForConditionalGeneration",
        _muse_glimmer,
        sliding_window=_WINDOW,
        output_multiplier=positive("logit_scale"),
        final_logit_softcapping=positive("final_logit_softcapping"),
    ),
    "nanbeige": declared(
        "nanbeige",
        "NanbeigeForCausalLM",
        num_loops=integer("num_loops", 1),
        skip_loop_final_norm=boolean("skip_loop_final_norm", False),
    ),
    "nemotron": declared("nemotron", "NemotronForCausalLM", family, hidden_act="relu2"),
    "olmo": declared(
        "olmo",
        "OlmoForCausalLM",
        family,
        clip_qkv=lambda fields: fields.optional_positive("attention.clamp_kqv"),
    ),
    "olmo2": _olmo2,
    "ouro": declared(
        "ouro",
        "OuroForCausalLM",
        total_ut_steps=integer("num_loops", 1),
        early_exit_threshold=1.0,
    ),
    "openelm": declared("openelm", "OpenELMForCausalLM", _openelm_layers),
    "orion": declared("orion", "OrionForCausalLM", family),
    "pangu-embedded": declared(
        "PanguEmbedded", "PanguEmbeddedForCausalLM", bias=has("blk.0.attn_q.bias")
    ),
    "paddleocr": declared("llama", "LlamaForCausalLM", optional_axes),
    "phi2": declared("phi", "PhiForCausalLM", family, hidden_act="gelu_new"),
    "phi3": declared(
        "phi3",
        "Phi3ForCausalLM",
        partial_rotary,
        original_max_position_embeddings=lambda fields: fields.integer(
            "rope.scaling.original_context_length", fields.integer("context_length")
        ),
        sliding_window=_WINDOW,
    ),
    "plamo": declared("plamo", "PlamoForCausalLM"),
    "plamo3": declared(
        "plamo3",
        "Plamo3ForCausalLM",
        sliding_window=_WINDOW,
        layer_types=lambda fields: layer_types(fields, default_period=8 if _WINDOW(fields) else 1),
        rope_scaling=_plamo3_scaling,
        rope_local_theta=lambda fields: fields.positive(
            "rope.freq_base_swa", fields.positive("rope.freq_base", 10_000.0)
        ),
        has_whole_norm_weights=True,
    ),
    "plm": declared("plm", "PLMForCausalLM", latent_attention, hidden_act="relu2"),
    "qwen": declared("qwen2", "Qwen2ForCausalLM", _qwen_sizes, **_NO_WINDOW),
    "qwen2": _QWEN2,
    "qwen2vl": declared("qwen2", "Qwen2ForCausalLM", rotary_axes, **_NO_WINDOW),
    "qwen3": declared("qwen3", "Qwen3ForCausalLM", **_NO_WINDOW),
    "qwen3vl": declared("qwen3", "Qwen3ForCausalLM", rotary_axes, **_NO_WINDOW),
    # A Llama with ALiBi, as the larger Baichuan.
    "refact": declared("baichuan", "BaichuanForCausalLM"),
    "seed_oss": declared(
        "seed_oss",
        "SeedOssForCausalLM",
        family,
        attention_out_bias=has("blk.0.attn_output.bias"),
    ),
    "smollm3": declared(
        "smollm3",
        "SmolLM3ForCausalLM",
        no_rope_layers=lambda fields: [int((i + 1) % 4 != 0) for i in range(fields.num_layers)],
        no_rope_layer_interval=4,
    ),
    "stablelm": declared(
        "stablelm",
        "StableLmForCausalLM",
        family,
        use_parallel_residual=boolean("use_parallel_residual", False),
        use_qkv_bias=has("blk.0.attn_q.bias"),
        qk_layernorm=has("blk.0.attn_q_norm.weight"),
    ),
    "starcoder": declared(
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        family,
        hidden_act="gelu_pytorch_tanh",
        multi_query=lambda fields: fields.integer("attention.head_count_kv", 1) < fields.num_heads,
        has_grouped_qkv=False,
    ),
    "talkie": declared(
        "talkie",
        "TalkieForCausalLM",
        logit_scale=positive("logit_scale", 1.0),
        rotates_inversely=False,
    ),
    "spark2_5": declared(
        "spark2_5",
        "Spark2_5ForCausalLM",
        hidden_act="gelu",
        headwise_attn_output_gate=True,
        layer_types=windows(4),
        sliding_window=_WINDOW,
        rope_parameters=lambda fields: ropes_by_type(
            fields, rotary_dim(fields), rope_scaling(fields)
        ),
        rope_scaling=None,
    ),
    "starcoder2": declared(
        "starcoder2", "Starcoder2ForCausalLM", family, hidden_act="gelu_pytorch_tanh"
    ),
    "xverse": _PLAIN_LLAMA,
}
