"""The supported model families: from a Hugging Face config to a `ModelSpec`."""

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, Literal

from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.checkpoint.model_dimensions import DEFAULTS_OF_GEMMA3
from ..layers.rope import RopeSpec
from ..layers.spec import LayerSpec, ModelSpec, NormNames
from .rope_config import read_rope, read_rope_of_layer_type

_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_UNSUPPORTED = {
    "num_local_experts": "mixtures of experts",
    "num_experts": "mixtures of experts",
    "use_bidirectional_attention": "bidirectional attention",
}


def model_spec(config: Mapping[str, Any], path: str | PathLike[str]) -> ModelSpec:
    """Return the spec of the model that a Hugging Face config describes.

    Args:
        config: The content of a config.json.
        path: The config's file, for error messages.

    Raises:
        CheckpointError: The architecture is unknown, a field is missing or invalid, or a feature is not supported.
    """
    fields = ConfigFields(config, path)
    model_type = _model_type(fields)
    text_fields = fields.section("text_config")
    if text_fields is not None:
        fields = text_fields.with_values({"model_type": model_type})
    for name, feature in _UNSUPPORTED.items():
        if config.get(name) or fields.get(name):
            raise fields.error(f"{feature} are not supported ({name} is set); use another model")
    spec = _FAMILIES[model_type](fields)
    if spec.num_heads % spec.num_kv_heads:
        raise fields.error(
            f"num_attention_heads {spec.num_heads} must be a multiple of "
            f"num_key_value_heads {spec.num_kv_heads}"
        )
    return spec


def _model_type(fields: ConfigFields) -> str:
    """Return the model type of the architecture if one is given, because classifiers share their model type."""
    architectures = fields.texts("architectures")
    if architectures:
        found = next((_ARCHITECTURES[name] for name in architectures if name in _ARCHITECTURES), "")
    else:
        found = fields.text("model_type", "")
    if found not in _FAMILIES:
        named = ", ".join(architectures) or f"of model_type {fields.get('model_type')!r}"
        raise fields.error(
            f"the architecture {named} is not supported; "
            f"supported are {', '.join(sorted(_ARCHITECTURES))}"
        )
    return found


def _base(fields: ConfigFields, layers: tuple[LayerSpec, ...], **differences: Any) -> ModelSpec:
    """Return the spec of a Llama model with `differences`."""
    num_heads, head_dim = fields.integer("num_attention_heads"), _head_dim(fields)
    activation = fields.text("hidden_activation", fields.text("hidden_act", "silu"))
    if activation not in _ACTIVATIONS:
        raise fields.error(
            f"hidden_act {activation!r} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )
    llama: dict[str, Any] = {
        "model_type": fields.get("model_type"),
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "layers": layers,
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "attention_scale": head_dim**-0.5,
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", False),
        "activation": _ACTIVATIONS[activation],
    }
    return ModelSpec(**llama | differences)


def _head_dim(fields: ConfigFields) -> int:
    default = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    return fields.integer("head_dim", default)


def _uniform_layers(
    fields: ConfigFields, rope: RopeSpec, window: int | None = None
) -> tuple[LayerSpec, ...]:
    return (LayerSpec(rope, window),) * fields.layer_count("num_hidden_layers")


def _slides(fields: ConfigFields, default: Callable[[int], bool]) -> list[bool]:
    """Return whether each layer has a window; `default` applies if the config does not say."""
    num_layers = fields.layer_count("num_hidden_layers")
    layer_types = fields.per_layer("layer_types", num_layers)
    if layer_types is None:
        return [default(i) for i in range(num_layers)]
    for layer_type in layer_types:
        if layer_type not in ("sliding_attention", "full_attention"):
            raise fields.error(f"the layer type {layer_type!r} is not supported")
    return [layer_type == "sliding_attention" for layer_type in layer_types]


def _attention_biases(fields: ConfigFields) -> dict[str, bool]:
    bias = fields.boolean("attention_bias", False)
    return {"qkv_bias": bias, "attention_output_bias": bias}


def _llama(fields: ConfigFields, **differences: Any) -> ModelSpec:
    return _base(
        fields,
        _uniform_layers(fields, read_rope(fields, _head_dim(fields))),
        mlp_bias=fields.boolean("mlp_bias", False),
        **_attention_biases(fields),
        **differences,
    )


def _mistral(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(num_key_value_heads=8, sliding_window=4096)
    rope = read_rope(fields, _head_dim(fields))
    return _base(fields, _uniform_layers(fields, rope, fields.optional_integer("sliding_window")))


def _qwen_layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    rope = read_rope(fields, _head_dim(fields))
    if not fields.boolean("use_sliding_window", False):
        return _uniform_layers(fields, rope)
    window = fields.integer("sliding_window", 4096)
    first_sliding = fields.integer("max_window_layers", 28, minimum=0)
    slides = _slides(fields, lambda i: i >= first_sliding)
    return tuple(LayerSpec(rope, window if sliding else None) for sliding in slides)


def _qwen2(fields: ConfigFields) -> ModelSpec:
    return _base(fields, _qwen_layers(fields), qkv_bias=True)


def _qwen3(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(head_dim=128)
    return _base(fields, _qwen_layers(fields), qk_norm="head", **_attention_biases(fields))


_GEMMA_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}


def _gemma(fields: ConfigFields, layers: tuple[LayerSpec, ...], **differences: Any) -> ModelSpec:
    return _base(
        fields,
        layers,
        attention_scale=fields.positive("query_pre_attn_scalar") ** -0.5,
        final_softcap=fields.optional_positive("final_logit_softcapping"),
        norm_weight_offset=1.0,
        norms=NormNames(
            attention_output="post_attention_layernorm",
            mlp_input="pre_feedforward_layernorm",
            mlp_output="post_feedforward_layernorm",
        ),
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        **_attention_biases(fields),
        **differences,
    )


def _gemma2(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        **_GEMMA_DEFAULTS, attn_logit_softcapping=50.0, final_logit_softcapping=30.0
    )
    window = fields.integer("sliding_window")
    rope = read_rope(fields, _head_dim(fields))
    slides = _slides(fields, lambda i: i % 2 == 0)
    layers = tuple(LayerSpec(rope, window if sliding else None) for sliding in slides)
    softcap = fields.optional_positive("attn_logit_softcapping")
    return _gemma(fields, layers, attention_softcap=softcap)


def _gemma3(fields: ConfigFields) -> ModelSpec:
    # The configs on the hub leave out whatever is their class's default.
    fields = fields.with_defaults(**_GEMMA_DEFAULTS, **DEFAULTS_OF_GEMMA3)
    local_rope = read_rope_of_layer_type(
        fields,
        "sliding_attention",
        _head_dim(fields),
        theta_field="rope_local_base_freq",
        theta=10_000.0,
    )
    global_rope = read_rope_of_layer_type(
        fields, "full_attention", _head_dim(fields), theta_field="rope_theta", theta=1_000_000.0
    )
    period = fields.integer("sliding_window_pattern", 6)
    slides = _slides(fields, lambda i: (i + 1) % period != 0)
    local = LayerSpec(local_rope, fields.optional_integer("sliding_window"))
    layers = tuple(local if sliding else LayerSpec(global_rope) for sliding in slides)
    # Its configs may name an attn_logit_softcapping, which the models do not have.
    return _gemma(fields, layers, qk_norm="head")


def _phi3(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(rms_norm_eps=1e-5)
    rope = read_rope(fields, _head_dim(fields), partial=True)
    window = fields.optional_integer("sliding_window")
    return _base(fields, _uniform_layers(fields, rope, window), fused_projections=True)


def _smollm3(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(tie_word_embeddings=True)
    num_layers = fields.layer_count("num_hidden_layers")
    interval = fields.integer("no_rope_layer_interval", 4)
    has_rope = fields.per_layer("no_rope_layers", num_layers)
    if has_rope is None:
        has_rope = [(i + 1) % interval != 0 for i in range(num_layers)]
    rope = read_rope(fields, _head_dim(fields), theta=2_000_000.0)
    window = None
    if fields.boolean("use_sliding_window", False):
        window = fields.optional_integer("sliding_window")
    slides = _slides(fields, lambda i: not has_rope[i])
    layers = tuple(
        LayerSpec(rope if rotates else None, window if sliding else None)
        for rotates, sliding in zip(has_rope, slides, strict=True)
    )
    return _base(
        fields, layers, mlp_bias=fields.boolean("mlp_bias", False), **_attention_biases(fields)
    )


def _olmo2(fields: ConfigFields) -> ModelSpec:
    return _llama(
        fields.with_defaults(rms_norm_eps=1e-5),
        norms=NormNames(
            attention_input=None,
            attention_output="post_attention_layernorm",
            mlp_input=None,
            mlp_output="post_feedforward_layernorm",
        ),
        qk_norm="full",
    )


def _granite(fields: ConfigFields) -> ModelSpec:
    return _llama(
        fields,
        attention_scale=fields.positive("attention_multiplier", 1.0),
        embedding_scale=fields.positive("embedding_multiplier", 1.0),
        residual_multiplier=fields.positive("residual_multiplier", 1.0),
        logits_divisor=fields.positive("logits_scaling", 1.0),
    )


_FAMILIES: dict[str, Callable[[ConfigFields], ModelSpec]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "granite": _granite,
    "llama": _llama,
    "mistral": _mistral,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
}
_ARCHITECTURES = {
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GraniteForCausalLM": "granite",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Olmo2ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
}
