"""The code that the families' modules share: the type `Family`, and the spec of a Llama model as a base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.pooling.classification import TOKEN_IDS, read_num_labels
from ...layers.activations import ACTIVATIONS, NAMES_IN_CONFIGS, Activation
from ...layers.layer_spec import LayerSpec
from ...layers.rope import QueryScaling, RopeSpec
from ...layers.spec import ModelSpec
from ...layers.specs.experts import GateLimit
from ...layers.specs.score_head import ScoreHeadSpec


class Family(NamedTuple):
    """A supported architecture, its `model_type`, and the function that maps its config to a spec."""

    architecture: str
    model_type: str
    read_spec: Callable[[ConfigFields], ModelSpec]


def base_spec(fields: ConfigFields, layers: tuple[LayerSpec, ...], **differences: Any) -> ModelSpec:
    """Return the spec of a Llama model, changed by `differences`."""
    num_heads, head_size = fields.integer("num_attention_heads"), head_dim(fields)
    field = "hidden_act" if fields.get("hidden_activation") is None else "hidden_activation"
    activation: Activation = "xielu"
    if fields.get(field) != activation:
        activation = read_activation(fields, field, "silu")
    llama: dict[str, Any] = {
        "model_type": fields.get("model_type"),
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("num_key_value_heads", num_heads),
        "head_dim": head_size,
        "layers": layers,
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "attention_scale": head_size**-0.5,
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", False),
        "activation": activation,
    }
    return ModelSpec(**llama | differences)


def read_activation(fields: ConfigFields, name: str, default: str) -> Activation:
    """Return the activation without parameters that a field names."""
    found = fields.text(name, default)
    if (activation := NAMES_IN_CONFIGS.get(found)) not in ACTIVATIONS:
        raise fields.error(
            f"{name} {found!r} is not supported; supported are {', '.join(NAMES_IN_CONFIGS)}"
        )
    return activation


def layer_settings(fields: ConfigFields, same: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the settings of each layer: those of all layers, `same`, changed by `per_layer_config`."""
    found = [same] * count
    per_layer = fields.section("per_layer_config")
    if per_layer is None:
        return found
    # Layer numbers may have leading zeros.
    for name in per_layer.config:
        section = per_layer.section(name)
        if not name.isdecimal() or int(name) >= count or section is None:
            raise fields.error(f"per_layer_config has {name!r}, which is not a layer with settings")
        found[int(name)] = {**same, **section.config}
    return found


def with_score_head(
    spec: ModelSpec,
    fields: ConfigFields,
    *,
    output: str,
    dense: str | None = None,
    dense_bias: bool = True,
    activation: Activation = "tanh",
    norm: str | None = None,
    output_bias: bool = False,
    **differences: Any,
) -> ModelSpec:
    """Return a spec with a classification head instead of the output projection.

    Args:
        spec: The spec of the model without the head.
        fields: The model's config.
        output: A regular expression for the prefix of the tensor names of the head's output projection.
        dense: The same for the head's dense layer, which precedes it; None for a head without one.
        dense_bias: True if the dense layer has a bias.
        activation: The activation after the dense layer.
        norm: A regular expression for the prefix of the norm after the activation; None for a head without one.
        output_bias: True if the output projection has a bias.
        differences: Further fields of the head.
    """
    head = ScoreHeadSpec(
        spec.vocab_size if differences.get("scores_vocabulary") else read_num_labels(fields),
        has_dense=dense is not None,
        dense_bias=dense_bias,
        activation=activation,
        has_norm=norm is not None,
        output_bias=output_bias,
        token_ids=tuple(fields.token_ids(TOKEN_IDS)),
        reads_embedding=spec.tie_word_embeddings,
        **differences,
    )
    names = [(output, "score_head.output.")]
    if dense is not None:
        names.insert(0, (dense, "score_head.dense."))
    if norm is not None:
        names.insert(0, (norm, "score_head.norm."))
    return replace(
        spec,
        score_head=head,
        tensor_names=(*names, *spec.tensor_names),
        # A classifier has no output projection to the vocabulary.
        tie_word_embeddings=True,
        head_dense_bias=None,
        head_bias=False,
    )


def head_dim(fields: ConfigFields) -> int:
    """Return the head dimension; by default, the hidden size divided by the number of heads."""
    default = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    return fields.integer("head_dim", default)


def uniform_layers(
    fields: ConfigFields,
    rope: RopeSpec | None,
    window: int | None = None,
    query_scaling: QueryScaling | None = None,
) -> tuple[LayerSpec, ...]:
    """Return the specs of layers that are all equal."""
    return (LayerSpec(rope, window, query_scaling=query_scaling),) * fields.layer_count(
        "num_hidden_layers"
    )


def sliding_layers(fields: ConfigFields, default: Callable[[int], bool]) -> list[bool]:
    """Return for each layer whether it has a sliding window; `default` applies if the config does not say."""
    num_layers = fields.layer_count("num_hidden_layers")
    layer_types = fields.per_layer("layer_types", num_layers)
    if layer_types is None:
        return [default(i) for i in range(num_layers)]
    for layer_type in layer_types:
        if layer_type not in ("sliding_attention", "full_attention"):
            raise fields.error(f"the layer type {layer_type!r} is not supported; use another model")
    return [layer_type == "sliding_attention" for layer_type in layer_types]


def windowed_layers(
    fields: ConfigFields,
    default: Callable[[int], bool],
    local: RopeSpec,
    full: RopeSpec | None,
    window: int | None = None,
) -> tuple[LayerSpec, ...]:
    """Return the specs of layers of which some have a window, by default `window`; see `sliding_layers`.

    `local` is the rotary embedding of the layers with a window, and `full` that of the others.
    """
    own, others = LayerSpec(local, fields.integer("sliding_window", window)), LayerSpec(full)
    return tuple(own if slides else others for slides in sliding_layers(fields, default))


def read_layer_numbers(fields: ConfigFields, name: str) -> set[int] | None:
    """Return the numbers of layers in a list, or in a text with commas between them; None if the field is absent.

    Raises:
        CheckpointError: The field has something else than numbers.
    """
    listed = fields.get(name)
    numbers = listed.split(",") if isinstance(listed, str) else listed
    if numbers is None:
        return None
    try:
        return {int(number) for number in numbers}
    except (TypeError, ValueError):
        raise fields.wrong(name, "the numbers of layers", listed) from None


def attention_biases(fields: ConfigFields) -> dict[str, bool]:
    """Return changes of a spec for configs whose `attention_bias` applies to all projections of the attention."""
    bias = fields.boolean("attention_bias", False)
    return {"qkv_bias": bias, "attention_output_bias": bias}


def require_usual_swiglu(fields: ConfigFields) -> None:
    """Raise CheckpointError if the constants of the clamped SwiGLU are not the usual ones."""
    fields.require_all(swiglu_alpha=1.702, swiglu_limit=7.0)


def read_limits(fields: ConfigFields, name: str) -> list[GateLimit | None]:
    """Return the clamp of each layer's activated gates, from a list or a number; 0 and null mean no clamp.

    Raises:
        CheckpointError: A value is negative or no number.
    """
    num_layers = fields.layer_count("num_hidden_layers")
    values = fields.get(name)
    if isinstance(values, list):
        # The layers after the last are for multi-token prediction.
        fields = fields.with_values({name: values[:num_layers]})
    values = fields.per_layer(name, num_layers) or [None] * num_layers
    for value in values:
        if value is not None and (type(value) not in (int, float) or value < 0):
            raise fields.error(f"{name} must have numbers of at least 0 or null, got {value!r}")
    return [GateLimit(float(value), is_activated=True) if value else None for value in values]


def with_limits(
    spec: ModelSpec, limits: Sequence[GateLimit | None], shared_limits: Sequence[GateLimit | None]
) -> ModelSpec:
    """Return the spec with clamped gates: `limits` of the layers' experts, `shared_limits` of their (shared) MLPs."""
    layers = [
        replace(layer, gate_limit=x) for layer, x in zip(spec.layers, shared_limits, strict=True)
    ]
    for i, (layer, limit) in enumerate(zip(layers, limits, strict=True)):
        if layer.experts is not None:
            layers[i] = replace(layer, experts=replace(layer.experts, gate_limit=limit))
    return replace(spec, layers=tuple(layers))


def without_axes(spec: ModelSpec) -> ModelSpec:
    """Return the spec of a decoder whose rotary positions have one coordinate, also for images and audio."""
    layers = tuple(
        replace(layer, rope=replace(layer.rope, axes=()))
        if layer.rope is not None and layer.rope.axes
        else layer
        for layer in spec.layers
    )
    return replace(spec, layers=layers)
