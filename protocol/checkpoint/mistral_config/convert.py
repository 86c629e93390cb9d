"""Translate the ``params.json`` of a Mistral model into a Hugging Face ``config.json``.

Models with a dense MLP become a Mistral, Ministral or Ministral 3, those with experts a Mixtral, and those with latent
attention a Mistral 4.
"""

from __future__ import annotations

from typing import Any, Final

from ..config_fields import ConfigFields
from .audio import with_audio
from .images import with_images

_NAMES: Final = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
"""Required numbers, and their names in a config.json."""

_EXPERT_NAMES: Final = {
    "num_experts": "n_routed_experts",
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "routed_scale": "routed_scaling_factor",
}
_LATENT_FIELDS: Final = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
_DEFAULT_LENGTH: Final = 128_000
"""The context length of models whose file has none, as in vLLM."""

_IDS: Final = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 11}
"""The ids of tokens that are the same in all of Mistral's tokenizers."""


def convert_params(params: ConfigFields) -> ConfigFields:
    """Return the fields of a config.json for those of a params.json.

    Raises:
        CheckpointError: A field is missing or invalid, or a part of the model is not supported.
    """
    params.require("model_type", "transformer", default="transformer")
    for name in ("lora", "moe_lora"):
        if params.get(name) is not None:
            raise params.error(f"{name} is not supported; merge the adapter into the weights")
    config: dict[str, Any] = {other: params.integer(name) for name, other in _NAMES.items()}
    heads = params.integer("n_heads")
    config |= _IDS | {
        "num_key_value_heads": params.integer("n_kv_heads", heads),
        "rms_norm_eps": params.number("norm_eps", 1e-5),
        "hidden_act": params.text("activation", "silu"),
        "tie_word_embeddings": params.boolean("tied_embeddings", False),
        "max_position_embeddings": params.integer(
            "max_position_embeddings", params.integer("max_seq_len", _DEFAULT_LENGTH)
        ),
        "rope_parameters": _rope(params),
    }
    if params.get("head_dim") is not None:
        config["head_dim"] = params.integer("head_dim")
    config |= _kind(params)
    if (quantization := _quantization(params)) is not None:
        config["quantization_config"] = quantization
    return ConfigFields(with_audio(params, config) or with_images(params, config), params.path)


def _kind(params: ConfigFields) -> dict[str, Any]:
    if params.get("qk_nope_head_dim") is not None:
        return _latent(params)
    window = params.get("sliding_window")
    experts = params.section("moe")
    if experts is not None:
        for name in ("num_shared_experts", "first_k_dense_replace"):
            experts.require(name, 0, ", without latent attention")
        return {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": experts.integer("num_experts"),
            "num_experts_per_tok": experts.integer("num_experts_per_tok"),
            "sliding_window": params.optional_integer("sliding_window"),
        }
    if isinstance(window, list):
        return _alternating(params, window)
    if isinstance(window, str):
        # Some files have the number as a text.
        params = params.with_values({"sliding_window": int(window) if window.isdigit() else window})
    scaled = params.get("llama_4_scaling") is not None
    return {
        "model_type": "ministral3" if scaled else "mistral",
        "architectures": ["Ministral3ForCausalLM" if scaled else "MistralForCausalLM"],
        "sliding_window": params.optional_integer("sliding_window"),
    }


def _alternating(params: ConfigFields, windows: list[Any]) -> dict[str, Any]:
    """Return the fields of a model whose layers have windows in a repeated pattern; null means none."""
    count = params.layer_count("n_layers")
    sizes = {size for size in windows if size is not None}
    if not windows or count % len(windows) or len(sizes) > 1:
        raise params.wrong(
            "sliding_window",
            f"a list of one size and nulls that repeats in {count} layers",
            windows,
        )
    if params.get("llama_4_scaling") is not None:
        raise params.error("sliding_window is not supported as a list with llama_4_scaling")
    names = ("full_attention" if size is None else "sliding_attention" for size in windows)
    return {
        "model_type": "ministral",
        "architectures": ["MinistralForCausalLM"],
        "sliding_window": next(iter(sizes), None),
        "layer_types": list(names) * (count // len(windows)),
    }


def _latent(params: ConfigFields) -> dict[str, Any]:
    """Return the fields of a model with latent attention, with or without experts."""
    found = {name: params.get(name) for name in _LATENT_FIELDS}
    experts = params.section("moe")
    if experts is None:
        layers = params.layer_count("n_layers")
        found |= {"n_routed_experts": 1, "num_experts_per_tok": 1, "first_k_dense_replace": layers}
    else:
        experts.require_all(route_every_n=1, num_expert_groups=1, num_expert_groups_per_tok=1)
        found |= {other: experts.get(name) for name, other in _EXPERT_NAMES.items()}
    found |= {
        "model_type": "mistral4",
        "architectures": ["Mistral4ForCausalLM"],
        "first_k_dense_replace": found["first_k_dense_replace"] or 0,
        # Each head has its own keys, which are computed from the latent vector.
        "num_key_value_heads": params.integer("n_heads"),
        "head_dim": None,
    }
    return found


def _rope(params: ConfigFields) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": params.positive("rope_theta", 10_000.0),
    }
    is_latent = params.get("qk_nope_head_dim") is not None
    yarn = params.section("yarn")
    if yarn is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.positive("factor"),
            "original_max_position_embeddings": yarn.integer("original_max_position_embeddings"),
            "beta_fast": yarn.positive("beta", 32.0),
            "beta_slow": yarn.positive("alpha", 1.0),
        }
        if not yarn.boolean("apply_scale", True):
            rope["attention_factor"] = 1.0
        elif is_latent:
            rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    scaling = params.section("llama_4_scaling")
    if scaling is not None:
        length = scaling.integer("original_max_position_embeddings")
        if rope.setdefault("original_max_position_embeddings", length) != length:
            raise scaling.wrong(
                "original_max_position_embeddings",
                f"{rope['original_max_position_embeddings']}, as in yarn",
                length,
            )
        rope["llama_4_scaling_beta"] = scaling.positive("beta")
    return rope


def _quantization(params: ConfigFields) -> dict[str, Any] | None:
    """Return the fields of the quantization; None if the weights are not quantized."""
    found = params.section("quantization")
    if found is None or not found.config:
        return None
    method = found.text("quant_method", "").replace("_", "-").lower()
    if method == "compressed-tensors":
        return {**found.config, "quant_method": method}
    found.require("qformat_weight", "fp8_e4m3", default="")
    activations = found.text("qscheme_act", "TENSOR")
    schemes = {"TENSOR": "static", "NO_SCALES": "dynamic"}
    if activations not in schemes:
        raise found.wrong("qscheme_act", f"one of {', '.join(schemes)}", activations)
    return {"quant_method": "fp8", "activation_scheme": schemes[activations]}
