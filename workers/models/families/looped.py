"""Families that compute some layers several times, each time with their own keys, or return to earlier states."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ....protocol.checkpoint.config_fields import MAX_LAYERS, ConfigFields
from ....protocol.checkpoint.pooling.embedding import text_spans
from ...layers.layer_spec import LayerSpec
from ...layers.read_rope import read_rope, read_rope_of_layer_type
from ...layers.rope import RopeSpec
from ...layers.shared_block import Restart
from ...layers.spec import ModelSpec
from ...layers.specs.norm_names import NormNames
from ...loaders.row_factors import RowFactors
from .common import Family, base_spec, head_dim, windowed_layers
from .llama import llama


def looped_layers(
    layers: Sequence[LayerSpec], passes: Sequence[tuple[range, Restart | None]]
) -> tuple[LayerSpec, ...]:
    """Return the layers of all passes in order. A pass computes a range of `layers`.

    Layers that were computed before have the weights of their first pass.
    """
    result: list[LayerSpec] = []
    first_use: dict[int, int] = {}
    for indices, restart in passes:
        for i in indices:
            weights = first_use.setdefault(i, len(result))
            result.append(
                replace(
                    layers[i],
                    restart=restart if i == indices.start else None,
                    weights=None if weights == len(result) else weights,
                )
            )
    return tuple(result)


def _refuse(fields: ConfigFields, *names: str) -> None:
    """Raise CheckpointError if one of these fields is true."""
    for name in names:
        fields.require(name, False)


def _hrm_text(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an HRM-Text: a slow state and a fast one, each the output of a stack of layers.

    In a cycle, the fast stack runs several times on the sum of both states, then the slow stack runs once on it.
    """
    fields = fields.with_defaults(head_dim=128)
    count = fields.integer("num_layers_per_stack", fields.layer_count("num_hidden_layers"))
    slow_cycles, fast_cycles = fields.integer("H_cycles", 2), fields.integer("L_cycles", 3)
    _refuse(fields, "attention_bias", "mlp_bias")
    fast, slow = range(count), range(count, 2 * count)
    passes: list[tuple[range, Restart | None]] = []
    for cycle in range(slow_cycles):
        for i in range(fast_cycles):
            # The output of the stack before this one is kept, and the other state is added.
            is_after_slow = i == 0
            restart = Restart(keeps=0, adds=1) if is_after_slow else Restart(keeps=1, adds=0)
            if cycle == i == 0:
                restart = Restart(norms=False, keeps=0, adds_initial=True)
            passes.append((fast, restart))
        passes.append((slow, Restart(keeps=1, adds=0)))
    layer = LayerSpec(read_rope(fields, head_dim(fields)))
    # The layers of a stack are numbered as where they are first computed.
    first_slow = fast_cycles * count
    return base_spec(
        fields.with_values({"num_key_value_heads": fields.integer("num_attention_heads")}),
        looped_layers([layer] * (2 * count), passes),
        text_spans=text_spans(fields),
        has_norm_weights=False,
        gates_attention=True,
        has_gate_projection=True,
        embedding_scale=fields.positive(
            "embedding_scale", 1 / fields.positive("initializer_range", 0.02)
        ),
        tensor_names=(
            # GGUF files number the layers of the slow stack after those of the fast one.
            *(
                (rf"^model\.layers\.{count + i}\.", f"model.layers.@{first_slow + i}.")
                for i in range(count)
            ),
            (r"\bL_module\.layers\.", "layers."),
            *((rf"\bH_module\.layers\.{i}\.", f"layers.@{first_slow + i}.") for i in range(count)),
            (r"\blayers\.@", "layers."),
            (r"\.attn\.", ".self_attn."),
            (r"\bz_L_init$", "initial_state"),
        ),
    )


def _ouro(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an Ouro, which computes all layers several times, with the final norm after each pass."""
    _refuse(fields, "use_sliding_window")
    fields.require("early_exit_threshold", 1.0, ": the number of passes is fixed")
    layers = [LayerSpec(read_rope(fields, head_dim(fields)))] * fields.layer_count(
        "num_hidden_layers"
    )
    restart = Restart(has_norm_weights=True)
    passes = [
        (range(len(layers)), restart if i else None)
        for i in range(fields.integer("total_ut_steps", 4))
    ]
    return base_spec(
        fields,
        looped_layers(layers, passes),
        norms=NormNames(
            attention_output="input_layernorm_2", mlp_output="post_attention_layernorm_2"
        ),
        tensor_names=((r"^(model\.)?early_exit_gate\..*", ""),),
    )


def _nanbeige(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Nanbeige 4.2: a Llama whose layers are computed several times, with norms in between."""
    count = fields.layer_count("num_hidden_layers")
    skips_norm = fields.boolean("skip_loop_final_norm", False)
    restart = None if skips_norm else Restart(has_norm_weights=True)
    layers = [LayerSpec(read_rope(fields, head_dim(fields)))] * count
    passes = [
        (range(count), restart if i else None)
        for i in range(fields.integer("num_loops", 1, maximum=MAX_LAYERS // count))
    ]
    return llama(fields, layers=looped_layers(layers, passes))


def _iquest_loop(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an IQuest-Coder Loop, whose later passes have windows and attend to the first one, too."""
    count = fields.layer_count("num_hidden_layers")
    num_passes = fields.integer("loop_num", 2, maximum=MAX_LAYERS // count)
    window = fields.integer("loop_window_size", 64)
    layer = LayerSpec(read_rope(fields, head_dim(fields)))
    repeated = [
        replace(layer, window=window, weights=i)
        for _ in range(num_passes - 1)
        for i in range(count)
    ]
    return llama(
        fields,
        layers=(*[layer] * count, *repeated),
        loop_window=window,
        tensor_names=(
            (r"^(model\.)?gate_projections\.(\d+)\.", r"model.layers.\2.self_attn.loop_gate."),
        ),
    )


def _dory(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Nemotron Dory, an nGPT (arXiv 2410.01131) some of whose layers are computed several times.

    Its hidden states have an L2 norm of 1; here they have a root mean square of 1. Factors of a projection's outputs
    are applied to the rows of its matrix. A norm is dropped if another norm follows directly.
    """
    _refuse(fields, "attention_bias", "mlp_bias", "tie_word_embeddings")
    fields = fields.with_defaults(num_key_value_heads=4, head_dim=256, sliding_window=1024)
    kinds = fields.get("layer_types")
    # A layer may be described as two: attention and MLP.
    divisor = 2 if isinstance(kinds, list) and "mlp" in kinds else 1
    count = fields.layer_count("num_hidden_layers") // divisor
    values: dict[str, object] = {"num_hidden_layers": count}
    if divisor == 2:
        values["layer_types"] = kinds[::2]
    loops = fields.integer("n_recurrent_loops", 2)
    first, last = (
        fields.integer(f"n_{each}_layers", 8, minimum=0) // divisor for each in ("input", "output")
    )
    if first + last > count:
        needed = f"numbers whose sum is at most the {count} layers"
        raise fields.wrong("n_input_layers and n_output_layers", needed, (first, last))
    if loops > 1 and fields.text("recurrent_kv_cache_mode", "per_loop") != "per_loop":
        raise fields.wrong("recurrent_kv_cache_mode", "per_loop", "last_loop")
    fields = fields.with_values(values)
    size, hidden_size = head_dim(fields), fields.integer("hidden_size")
    local, full = (
        read_rope_of_layer_type(fields, kind, size, theta=theta)
        for kind, theta in (("sliding_attention", 1e4), ("full_attention", 1e7))
    )
    length = fields.integer("max_position_embeddings", 4096)
    # The norms after the rotation undo its factor on queries and keys.
    scales: dict[RopeSpec | None, float] = {
        rope: size**-0.5 * rope.inverse_frequencies(length)[1] ** 2 for rope in (local, full)
    }
    layers = [
        replace(layer, attention_scale=scales[layer.rope])
        for layer in windowed_layers(fields, lambda i: (i + 1) % 4 != 0, local, full)
    ]
    end = count - last
    passes: list[tuple[range, Restart | None]] = [(range(first), None)]
    passes += [(range(first, end), Restart(keeps=None if i else 0, adds=0)) for i in range(loops)]
    passes.append((range(end, count), None))
    skipped = (loops - 1) * (end - first)
    unit = fields.positive("initializer_range", 0.0177)
    norms = NormNames(
        attention_output="post_attention_layernorm",
        mlp_input="pre_feedforward_layernorm",
        mlp_output="post_feedforward_layernorm",
    )
    return base_spec(
        fields.with_values({"rms_norm_eps": 1e-6}),
        looped_layers(layers, passes),
        norms=norms,
        unit_norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
            "norm",
            "k_norm",
        ),
        qk_norm="each head",
        rotates_before_norm=True,
        gates_attention=True,
        has_gate_projection=True,
        interpolates_blocks=True,
        # The norm that is left out would have made outputs large.
        output_norm_eps=1e-24,
        residual_temperature=unit / fields.positive("ngpt_alpha_init", 0.05),
        embedding_scale=hidden_size**0.5,
        logits_divisor=hidden_size**0.5,
        row_factors=(
            RowFactors(r"\.self_attn\.q_norm\.weight$", "", 1 / unit, 2),
            RowFactors(r"self_attn\.gate_proj\.weight$", "self_attn.s_gate", 1 / unit, 2),
            RowFactors(r"mlp\.gate_proj\.weight$", "mlp.suv_gate"),
            RowFactors(r"mlp\.up_proj\.weight$", "mlp.suv_up"),
            RowFactors(r"lm_head\.weight$", "lm_head.logit_scale", 1 / unit),
        ),
        tensor_names=(
            (r"^backbone\.", "model."),
            (r"\.embeddings\.", ".embed_tokens."),
            *(
                (rf"\blayers\.{2 * i + (name == 'mlp')}\.{stored}", f"layers.@{i}.{own}")
                for i in range(count)
                for name, stored, own in (
                    ("attn", r"mixer\.", "self_attn."),
                    ("attn", "attn_alpha$", "lambda_1"),
                    ("mlp", r"mixer\.", "mlp."),
                    ("mlp", "mlp_alpha$", "lambda_2"),
                )
            ),
            (r"\blayers\.@", "layers."),
            *((rf"\blayers\.{i}\.", f"layers.@{i + skipped}.") for i in range(end, count)),
            (r"\blayers\.@", "layers."),
            (r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."),
            (r"\.sqk$", ".q_norm.weight"),
            (r"\.lambda_1$", ".post_attention_layernorm.residual_gate"),
            (r"\.lambda_2$", ".post_feedforward_layernorm.residual_gate"),
        ),
    )


def _solar(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Solar Pro, a Llama some of whose layers begin with a mean of two hidden states.

    Under one of two names, some layers keep the state that they read. Layers that follow read its mean with their own.
    """
    spec, shares = llama(fields), fields.get("bskcn_tv", [0.9, 0.8])
    if not isinstance(shares, list) or len(shares) != 2:
        raise fields.wrong("bskcn_tv", "two numbers, for training and for inference", shares)
    share = fields.with_values({"bskcn_tv": shares[1]}).number("bskcn_tv")
    if not 0 < share <= 1:
        raise fields.wrong("bskcn_tv", "a second number above 0 and at most 1", share)
    keepers, readers = (
        [fields.with_defaults(**{name: usual}).integers(name) for name, usual in names.items()]
        for names in (_SOLAR_KEEPERS, _SOLAR_READERS)
    )
    states: list[int | None] = [None, None]
    layers = []
    for i, layer in enumerate(spec.layers):
        keeps = adds = None
        if renewed := [name for name, each in enumerate(keepers) if i in each]:
            # The other name, if it is not renewed, needs its state.
            keeps = int(any(states[name] == 0 for name in {0, 1}.difference(renewed)))
            for name in renewed:
                states[name] = keeps
        if read := [name for name, each in enumerate(readers) if i in each]:
            adds = states[read[0]]
            if adds is None or len(read) > 1:
                needed = f"one state that an earlier layer kept before layer {i}"
                raise fields.wrong("bskcn_3 and bskcn_4", needed, readers)
        if renewed or read:
            layer = replace(
                layer, restart=Restart(norms=False, keeps=keeps, adds=adds, share=share)
            )
        layers.append(layer)
    return replace(spec, layers=tuple(layers))


_SOLAR_KEEPERS = {"bskcn_1": [12, 20, 32, 44], "bskcn_2": [20, 32]}
_SOLAR_READERS = {"bskcn_3": [16, 24, 36, 48], "bskcn_4": [28, 40]}
"""The fields of layers that keep and read states under each name, and their usual values."""


FAMILIES = (
    Family("DoryForCausalLM", "dory", _dory),
    Family("HrmTextForCausalLM", "hrm_text", _hrm_text),
    Family("IQuestLoopCoderForCausalLM", "iquestloopcoder", _iquest_loop),
    Family("NanbeigeForCausalLM", "nanbeige", _nanbeige),
    Family("OuroForCausalLM", "ouro", _ouro),
    Family("SolarForCausalLM", "solar", _solar),
)
