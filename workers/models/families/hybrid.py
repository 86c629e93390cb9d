"""Families with recurrent layers, and with attention in some layers."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.recurrent_config import read_recurrent_layer
from ....protocol.checkpoint.recurrent_layers import RecurrentLayer
from ....protocol.checkpoint.state_spaces.mamba import read_factors
from ...layers.layer_spec import LayerSpec
from ...layers.read_rope import read_rope, read_rope_of_layer_type
from ...layers.rope import RopeSpec
from ...layers.spec import ModelSpec
from ...layers.specs.experts import ExpertsSpec
from ...layers.specs.norm_names import NormNames
from .common import Family, attention_biases, base_spec, head_dim
from .experts import (
    GRANITE_NAMES,
    SHARED_EXPERT_NAMES,
    deepseek_experts,
    has_sparse_step,
    read_experts,
    unused_layers,
    with_experts,
)
from .llama import interleaved_axes

_RECURRENT = ("conv", "linear_attention", "mamba")
_ATTENDING = ("attention", "full_attention")
_MIXER = (r"\.(mamba|linear_attn)\.", ".mixer.")
QWEN3_5_AXES = 11, 11, 10
_LFM2_NAMES = (
    (r"\.conv\.conv\.", ".mixer.conv1d."),
    (r"\.conv\.", ".mixer."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.([qk])_layernorm\.", r".\1_norm."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
    (r"(^|\.)embedding_norm\.", r"\1norm."),
)
BAMBA_NAMES = (
    _MIXER,
    (r"\.feed_forward\.", ".mlp."),
    (r"(^|\.)final_layernorm\.", r"\1norm."),
)
_GRANITE_DENSE_NAMES = (
    (r"\.shared_mlp\.input_linear\.", ".mlp.gate_up_proj."),
    (r"\.shared_mlp\.output_linear\.", ".mlp.down_proj."),
)


def recurrent_layer(fields: ConfigFields) -> RecurrentLayer:
    """Return the description of a family's recurrent layers."""
    layer = read_recurrent_layer(fields)
    if layer is None:
        raise fields.error(
            f"model_type {fields.get('model_type')!r} does not match the architecture"
        )
    return layer


def mixed_layers(
    fields: ConfigFields,
    rope: RopeSpec | None,
    attends: Callable[[int], bool],
    names: tuple[str, ...] = ("layer_types", "layers_block_type"),
) -> tuple[LayerSpec, ...]:
    """Return layers with either attention or a recurrent mixer; `attends` applies if the config does not say."""
    count = fields.layer_count("num_hidden_layers")
    recurrent = LayerSpec(None, recurrent=recurrent_layer(fields), attends=False)
    kinds = next((kinds for name in names if (kinds := fields.per_layer(name, count))), None)
    if kinds is None:
        kinds = ["attention" if attends(i) else "mamba" for i in range(count)]
    for kind in kinds:
        if kind not in _RECURRENT + _ATTENDING:
            raise fields.error(f"the layer type {kind!r} is not supported; use another model")
    layers = tuple(LayerSpec(rope) if kind in _ATTENDING else recurrent for kind in kinds)
    if not any(layer.attends for layer in layers):
        raise fields.error(
            "no layer has attention; models without attention are not supported; use another one"
        )
    return layers


def layers_with_windows(
    fields: ConfigFields, local: RopeSpec, full: RopeSpec | None
) -> tuple[LayerSpec, ...]:
    """Return the layers of a hybrid model in which some attention layers have a sliding window.

    The config must have `layer_types`. `local` is the rotary embedding of the layers with a window, and `full` that of
    the other attention layers.
    """
    count = fields.layer_count("num_hidden_layers")
    kinds = fields.per_layer("layer_types", count) or []
    slides = [kind == "sliding_attention" for kind in kinds]
    names = [
        "full_attention" if has_window else kind
        for has_window, kind in zip(slides, kinds, strict=True)
    ]
    window = fields.integer("sliding_window")
    layers = mixed_layers(fields.with_values({"layer_types": names}), full, lambda _: True)
    return tuple(
        LayerSpec(local, window) if has_window else layer
        for has_window, layer in zip(slides, layers, strict=True)
    )


def layer_indices(fields: ConfigFields, name: str) -> list[int] | None:
    """Return a field that lists layers, or None if it is absent."""
    indices = fields.get(name)
    if indices is not None and not isinstance(indices, list | tuple):
        raise fields.wrong(name, "a list of layers", indices)
    return None if indices is None else list(indices)


def lfm2(fields: ConfigFields, layers: tuple[LayerSpec, ...] | None = None) -> ModelSpec:
    """Return the spec of an LFM2, with other layers if they are given."""
    fields = fields.with_defaults(
        tie_word_embeddings=fields.boolean("tie_embedding", True),
        rms_norm_eps=fields.number("norm_eps", 1e-5),
    )
    intermediate_size = fields.integer("block_ff_dim", fields.integer("intermediate_size", 12288))
    if fields.boolean("block_auto_adjust_ff_dim", True):
        intermediate_size = intermediate_size * 2 // 3
        factor = fields.optional_positive("block_ffn_dim_multiplier") or 1.0
        multiple = fields.integer("block_multiple_of", 256)
        intermediate_size = -(-int(factor * intermediate_size) // multiple) * multiple
    if layers is None:
        attending = layer_indices(fields, "full_attn_idxs")
        rope = read_rope(fields, head_dim(fields), theta=1_000_000.0)
        layers = mixed_layers(fields, rope, lambda i: attending is None or i in attending)
    return base_spec(
        fields.with_values({"intermediate_size": intermediate_size}),
        layers,
        norms=NormNames(attention_input="operator_norm", mlp_input="ffn_norm"),
        qk_norm="head",
        tensor_names=_LFM2_NAMES,
    )


def _lfm3(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an LFM3: an LFM2 with windows in some layers, norms of block outputs, and gated heads."""
    fields = fields.with_defaults(
        block_auto_adjust_ff_dim=False,
        head_dim=128,
        intermediate_size=7680,
        sliding_window=256,
        conv_L_cache=7,
        rope_parameters={
            "sliding_attention": {"rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.5,
            },
        },
        layer_types=[
            "full_attention" if i % 4 == 2 else "conv" if i % 4 or i == 0 else "sliding_attention"
            for i in range(fields.layer_count("num_hidden_layers"))
        ],
    )
    size = head_dim(fields)
    full, local = (
        read_rope_of_layer_type(fields, kind, size, theta=theta)
        for kind, theta in (("full_attention", 1_000_000.0), ("sliding_attention", 10_000.0))
    )
    spec = lfm2(fields, layers_with_windows(fields, local, full))
    norms = spec.norms
    if fields.boolean("use_sandwich_norm", True):
        norms = replace(norms, attention_output="post_operator_norm", mlp_output="post_ffn_norm")
    is_gated, has_biases = (
        fields.boolean("use_attention_gate", True),
        fields.boolean("attention_bias", False),
    )
    return replace(
        spec,
        norms=norms,
        gates_attention=is_gated,
        has_gate_projection=is_gated,
        has_head_gates=is_gated,
        qkv_bias=has_biases,
        attention_output_bias=has_biases,
        tensor_names=((r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."), *spec.tensor_names),
    )


def _granite_hybrid(fields: ConfigFields) -> ModelSpec:
    rope = None
    if fields.get("position_embedding_type") == "rope":
        rope = read_rope(fields, head_dim(fields))
    shared_size = fields.integer("shared_intermediate_size", 1024)
    spec = base_spec(
        fields.with_values({"intermediate_size": shared_size}),
        mixed_layers(fields, rope, lambda _: False),
        attention_scale=fields.positive("attention_multiplier", 1.0),
        embedding_scale=fields.positive("embedding_multiplier", 1.0),
        residual_multiplier=fields.positive("residual_multiplier", 1.0),
        logits_divisor=fields.positive("logits_scaling", 1.0),
        **attention_biases(fields),
    )
    if not fields.integer("num_local_experts", 8, minimum=0):
        return replace(spec, tensor_names=(_MIXER, *_GRANITE_DENSE_NAMES))
    experts = read_experts(
        fields, (8, 2), intermediate_size="intermediate_size", shared_intermediate_size=shared_size
    )
    return with_experts(spec, experts, tensor_names=(_MIXER, *GRANITE_NAMES))


def _bamba(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        rms_norm_eps=1e-5, num_key_value_heads=8, partial_rotary_factor=0.5
    )
    attending = layer_indices(fields, "attn_layer_indices") or []
    rope = read_rope(fields, head_dim(fields), partial=True)
    return base_spec(
        fields,
        mixed_layers(fields, rope, lambda i: i in attending, ("layers_block_type",)),
        norms=NormNames(mlp_input="pre_ff_layernorm"),
        mlp_bias=fields.boolean("mlp_bias", False),
        tensor_names=BAMBA_NAMES,
        **attention_biases(fields),
    )


def _qwen3_5(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(head_dim=256, partial_rotary_factor=0.25)
    interval = fields.integer("full_attention_interval", 4)
    rope = read_rope(fields, head_dim(fields), partial=True)
    return base_spec(
        fields,
        mixed_layers(fields, rope, lambda i: (i + 1) % interval == 0),
        qk_norm="head",
        norm_weight_offset=1.0,
        gates_attention=True,
        has_output_factors=fields.boolean("layer_scale", False),
        tensor_names=(_MIXER, (r"\.in_proj_qkv\.", ".qkv_proj."), *unused_layers(fields)),
        **attention_biases(fields),
    )


def qwen3_5_vl(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the decoder of a Qwen3.5 that reads images."""
    return _qwen3_5(interleaved_axes(fields, QWEN3_5_AXES))


def _lfm2_moe(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_values({"block_auto_adjust_ff_dim": False})
    first = fields.integer("num_dense_layers", 2, minimum=0)
    spec = lfm2(fields.with_defaults(num_key_value_heads=8, tie_embedding=True))
    experts = read_experts(
        fields,
        (32, 4, 1792),
        scoring="sigmoid",
        renormalizes=fields.boolean("norm_topk_prob", True),
        scale=fields.positive("routed_scaling_factor", 1.0),
        has_correction_bias=fields.boolean("use_expert_bias", True),
    )
    names = (
        (r"\.feed_forward\.expert_bias", ".mlp.gate.e_score_correction_bias"),
        (r"\.feed_forward\.(gate|experts\.\d+)\.(?!w\d)", r".mlp.\1."),
        (r"\.feed_forward\.experts\.(\d+)\.w1\.", r".mlp.experts.\1.gate_proj."),
        (r"\.feed_forward\.experts\.(\d+)\.w3\.", r".mlp.experts.\1.up_proj."),
        (r"\.feed_forward\.experts\.(\d+)\.w2\.", r".mlp.experts.\1.down_proj."),
    )
    return with_experts(
        spec, experts, lambda i: i >= first, tensor_names=(*names, *spec.tensor_names)
    )


def qwen3_next(fields: ConfigFields, num_experts: int = 512, num_chosen: int = 10) -> ModelSpec:
    """Return the spec of a Qwen3-Next, with other default numbers of experts if they are given."""
    fields = fields.with_defaults(
        moe_intermediate_size=512, shared_expert_intermediate_size=512, num_key_value_heads=2
    )
    spec = _qwen3_5(fields)
    experts = read_experts(
        fields,
        (num_experts, num_chosen),
        renormalizes=fields.boolean("norm_topk_prob", True),
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size", minimum=0),
        has_shared_gate=True,
    )
    names = (*spec.tensor_names, *SHARED_EXPERT_NAMES)
    return with_experts(spec, experts, has_sparse_step(fields), tensor_names=names)


def _qwen3_5_moe(fields: ConfigFields) -> ModelSpec:
    return qwen3_next(fields.with_defaults(intermediate_size=512), 256, 8)


def qwen3_5_vl_moe(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the decoder of a Qwen3.5 with experts that reads images."""
    return _qwen3_5_moe(interleaved_axes(fields, QWEN3_5_AXES))


def _lara_mini(fields: ConfigFields) -> ModelSpec:
    count = fields.layer_count("num_hidden_layers")
    pattern = ("linear", "sliding", "linear", "full", "sliding")
    fields = fields.with_defaults(
        head_dim=128,
        num_key_value_heads=4,
        sliding_window=512,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        tie_word_embeddings=True,
        layer_types=[f"{pattern[i % len(pattern)]}_attention" for i in range(count)],
    )
    shared_size = fields.integer("shared_expert_intermediate_size", minimum=0)
    experts = read_experts(
        fields,
        (128, 4),
        renormalizes=fields.boolean("norm_topk_prob", True),
        shared_intermediate_size=shared_size,
    )
    spec = base_spec(
        fields.with_values({"intermediate_size": shared_size}),
        layers_with_windows(fields, read_rope(fields, head_dim(fields)), None),
        qk_norm="head",
        **attention_biases(fields),
    )
    names = (r"\.out_norm\.", ".norm."), (r"\.in_proj_qkv\.", ".qkv_proj."), *SHARED_EXPERT_NAMES
    return with_experts(spec, experts, tensor_names=(_MIXER, *names))


def _falcon_h1(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(rms_norm_eps=1e-5, num_key_value_heads=8)
    biases, head_size = attention_biases(fields), head_dim(fields)
    attention_input = fields.positive("attention_in_multiplier", 1.0)
    if biases["qkv_bias"] and attention_input != 1.0:
        raise fields.error(
            "attention_bias with an attention_in_multiplier is not supported; use a model without one of them"
        )
    gate, mlp = read_factors(fields, "mlp_multipliers", 2)
    layer = LayerSpec(read_rope(fields, head_size), recurrent=recurrent_layer(fields))
    # The factors on queries, keys and values are applied to scores and outputs instead, which are linear in them.
    return base_spec(
        fields,
        (layer,) * fields.layer_count("num_hidden_layers"),
        norms=NormNames(mlp_input="pre_ff_layernorm"),
        attention_scale=head_size**-0.5
        * attention_input**2
        * fields.positive("key_multiplier", 1.0),
        attention_multiplier=attention_input * fields.positive("attention_out_multiplier", 1.0),
        recurrent_multiplier=fields.positive("ssm_out_multiplier", 1.0),
        gate_multiplier=gate,
        mlp_multiplier=mlp,
        embedding_scale=fields.positive("embedding_multiplier", 1.0),
        logits_divisor=1 / fields.positive("lm_head_multiplier", 1.0),
        mlp_bias=fields.boolean("mlp_bias", False),
        tensor_names=BAMBA_NAMES,
        **biases,
    )


_NEMOTRON_LAYERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _nemotron_h(fields: ConfigFields) -> ModelSpec:
    pattern = fields.get("hybrid_override_pattern")
    kinds = fields.get("layers_block_type", fields.get("layer_types"))
    if kinds is None and isinstance(pattern, str):
        kinds = [_NEMOTRON_LAYERS.get(letter, letter) for letter in pattern]
    if not kinds or not isinstance(kinds, list):
        raise fields.wrong(
            "layers_block_type",
            "a list of layer types, or absent with a hybrid_override_pattern",
            kinds,
        )
    recurrent = LayerSpec(None, recurrent=recurrent_layer(fields), attends=False, has_mlp=False)
    layers = []
    for kind in kinds:
        if kind in _RECURRENT:
            layers.append(recurrent)
        elif kind in _ATTENDING:
            layers.append(LayerSpec(None, has_mlp=False))
        elif kind in ("mlp", "moe"):
            layers.append(LayerSpec(None, attends=False))
        else:
            raise fields.error(f"the layer type {kind!r} is not supported; use another model")
    spec = base_spec(
        fields.with_defaults(
            head_dim=128,
            num_key_value_heads=8,
            intermediate_size=21504,
            hidden_act=fields.text("mlp_hidden_act", "relu2"),
            rms_norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        ),
        tuple(layers),
        norms=NormNames(attention_input="norm", mlp_input="norm"),
        has_gate=False,
        mlp_bias=fields.boolean("mlp_bias", False),
        # transformers never ties the embeddings, whatever the config says.
        tie_word_embeddings=False,
        tensor_names=(
            (r"\.mixer\.([qkvo]_proj)\.", r".self_attn.\1."),
            (r"\.mixer\.(up|down)_proj\.", r".mlp.\1_proj."),
            (r"\.mixer\.(gate|experts|shared_experts)\.", r".mlp.\1."),
            (r"\.mixer\.fc1_latent_proj\.", ".mlp.to_latent."),
            (r"\.mixer\.fc2_latent_proj\.", ".mlp.from_latent."),
            (r"(^|\.)embeddings\.", r"\1embed_tokens."),
            (r"(^|\.)norm_f\.", r"\1norm."),
            (r"mtp\..*", ""),
            *unused_layers(fields.with_defaults(num_hidden_layers=len(layers))),
        ),
    )
    if "moe" not in kinds:
        return spec
    return with_experts(spec, _nemotron_experts(fields), lambda i: kinds[i] == "moe")


def _nemotron_h_puzzle(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Nemotron-H whose layers have experts and MLPs of several sizes."""
    blocks = fields.get("block_configs")
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise fields.wrong("block_configs", "a list of objects", blocks)
    spec = _nemotron_h(
        fields.with_values({"layers_block_type": [block.get("block_type") for block in blocks]})
    )
    layers = []
    for layer, block in zip(spec.layers, blocks, strict=True):
        own = {name: x for name, x in block.items() if x is not None and name != "block_type"}
        fields_of_layer = fields.with_values(own)
        if layer.experts:
            layer = replace(layer, experts=_nemotron_experts(fields_of_layer))
        elif layer.has_mlp:
            layer = replace(layer, intermediate_size=fields_of_layer.integer("intermediate_size"))
        elif own:
            raise fields.error(
                f"block_configs with {min(own)!r} are not supported; use a model without them"
            )
        layers.append(layer)
    return replace(spec, layers=tuple(layers))


def _nemotron_experts(fields: ConfigFields) -> ExpertsSpec:
    experts = deepseek_experts(
        fields.with_defaults(
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=7688,
        )
    )
    return replace(
        experts,
        shared_intermediate_size=fields.integer("moe_shared_expert_intermediate_size", 7688),
        latent_size=fields.optional_integer("moe_latent_size") or 0,
    )


def _olmo_hybrid(fields: ConfigFields) -> ModelSpec:
    rope, parameters = None, fields.first_section("rope_parameters")
    if fields.get("rope_theta") is not None or parameters.get("rope_theta") is not None:
        rope = read_rope(fields, head_dim(fields))
    norms = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
    layers = tuple(
        replace(layer, norms=norms) if layer.attends else layer
        for layer in mixed_layers(fields, rope, lambda i: i % 4 == 3)
    )
    return base_spec(
        fields,
        layers,
        qk_norm="full",
        tensor_names=(
            (r"\.attention_layer_norm\.", ".input_layernorm."),
            (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
            (r"\.linear_attn\.([ab])_proj\.", r".mixer.in_proj_\1."),
            (r"\.linear_attn\.g_proj\.", ".mixer.in_proj_z."),
            (r"\.linear_attn\.o_proj\.", ".mixer.out_proj."),
            (r"\.linear_attn\.o_norm\.", ".mixer.norm."),
            _MIXER,
        ),
        **attention_biases(fields),
    )


FAMILIES = (
    Family("BambaForCausalLM", "bamba", _bamba),
    Family("FalconH1ForCausalLM", "falcon_h1", _falcon_h1),
    Family("GraniteMoeHybridForCausalLM", "granitemoehybrid", _granite_hybrid),
    Family("LaraMiniForCausalLM", "lara_mini", _lara_mini),
    Family("Lfm2ForCausalLM", "lfm2", lfm2),
    Family("Lfm3ForCausalLM", "lfm3", _lfm3),
    Family("NemotronHForCausalLM", "nemotron_h", _nemotron_h),
    Family("NemotronHPuzzleForCausalLM", "nemotron_h_puzzle", _nemotron_h_puzzle),
    Family("OlmoHybridForCausalLM", "olmo_hybrid", _olmo_hybrid),
    Family("ColQwen3_5", "qwen3_5", qwen3_5_vl),
    Family("Qwen3_5ForCausalLM", "qwen3_5_text", _qwen3_5),
    Family("Qwen3_5ForConditionalGeneration", "qwen3_5", qwen3_5_vl),
    Family("MiniCPMV4_7ForConditionalGeneration", "minicpmv4_7", qwen3_5_vl),
    Family("Lfm2MoeForCausalLM", "lfm2_moe", _lfm2_moe),
    Family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _qwen3_5_moe),
    Family("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", qwen3_5_vl_moe),
    Family("Qwen3NextForCausalLM", "qwen3_next", qwen3_next),
)
