"""Mixtures of experts whose configs or tensors have names of their own."""

from __future__ import annotations

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.layer_spec import LayerSpec
from ....layers.read_rope import read_rope
from ....layers.rope import ProportionalScaling, RopeSpec
from ....layers.spec import ModelSpec
from ....layers.specs.ngram import AveragedNgramSpec
from ....layers.specs.norm_names import NormNames
from ..common import (
    Family,
    attention_biases,
    base_spec,
    head_dim,
    read_layer_numbers,
    uniform_layers,
)
from ..experts import (
    MIXTRAL_NAMES,
    deepseek_experts,
    first_dense,
    gpt_oss,
    has_sparse_step,
    read_experts,
    unused_layers,
    with_experts,
)
from ..latent import longcat
from ..llama import llama, qwen_layers

_PUZZLE_NAMES = (
    (r".*\.q_scale$", ""),
    (r"\.self_attn\.(?:[kv]_proj|attn)\.([kv]_scale)$", r".self_attn.\1"),
)
"""Names of scales for queries, which are not rounded, and for keys and values in an FP8 cache."""

_ARCTIC_NAMES = (
    (r"\.layers\.@", ".layers."),
    (r"\.residual_layernorm\.", ".post_attention_layernorm."),
    (r"\.(residual_mlp|block_sparse_moe\.mlp)\.", ".mlp."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w3\.", ".up_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.block_sparse_moe\.", ".mlp."),
)

_GROVE_NAMES = ((r".*\.mlp\.expert_bias", ""),)
"""The biases are not used: experts are chosen by their scores."""

_GROK_NAMES = (
    # Grok 2 has an MLP beside the experts.
    (r"\.mlp\.(gate|up|down)_proj\.", r".mlp.shared_experts.\1_proj."),
    (r"\.attn\.", ".self_attn."),
    (r"\.moe_block\.", ".mlp."),
    (r"(\.experts\.\d+)\.linear\.", r"\1.gate_proj."),
    (r"(\.experts\.\d+)\.linear_v\.", r"\1.up_proj."),
    (r"(\.experts\.\d+)\.linear_1\.", r"\1.down_proj."),
    *MIXTRAL_NAMES,
)
_JETMOE_NAMES = (
    (r"\.self_attention\.experts\.router\.layer\.", ".self_attn.router."),
    (r"\.self_attention\.(experts\.\d+)\.input_linear\.", r".self_attn.\1.q_proj."),
    (r"\.self_attention\.(experts\.\d+)\.output_linear\.", r".self_attn.\1.o_proj."),
    (r"\.self_attention\.", ".self_attn."),
    (r"\.mlp\.router\.layer\.", ".mlp.gate."),
    (r"\.mlp\.(\d+)\.input_linear\.", r".mlp.experts.\1.gate_up_proj."),
    (r"\.mlp\.(\d+)\.output_linear\.", r".mlp.experts.\1.down_proj."),
    (r"\.mlp\.bias$", ".mlp.experts.bias"),
)


def _arctic(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Snowflake Arctic, as in the code that Snowflake published.

    The experts of a layer read its input, and their output is added after the layer's MLP. So they are a layer before
    it here.
    """
    fields = fields.with_defaults(num_key_value_heads=fields.integer("num_attention_heads"))
    experts = read_experts(fields, (8, 1), intermediate_size="intermediate_size")
    experts = replace(experts, renormalizes=experts.num_experts_per_token > 1)
    is_beside = fields.boolean("parallel_attn_mlp_res", fields.boolean("use_residual", False))
    period = fields.integer("moe_layer_frequency", 2)
    (plain,) = set(llama(fields).layers)
    alone = LayerSpec(
        None,
        attends=False,
        intermediate_size=0,
        experts=replace(experts, is_shortcut=True),
        norms=NormNames("", mlp_input="experts_norm"),
    )
    beside = replace(plain, intermediate_size=fields.integer("hidden_size"))
    layers: list[LayerSpec] = []
    names = []
    for i in range(fields.layer_count("num_hidden_layers")):
        # The mark "@" keeps later rules from renaming what these have renamed.
        old, new = rf"\.layers\.{i}\.", ".layers.@"
        if (i + 1) % period:
            layers.append(plain)
        elif is_beside:
            number = len(layers)
            layers += (alone, beside)
            names += [
                (rf"{old}post_attention_layernorm", f"{new}{number}.experts_norm"),
                (rf"{old}block_sparse_moe", f"{new}{number}.shortcut"),
            ]
        else:
            layers.append(replace(plain, experts=experts))
        names.append((old, f"{new}{len(layers) - 1}."))
    return llama(fields, layers=tuple(layers), tensor_names=(*names, *_ARCTIC_NAMES))


def _grok(fields: ConfigFields) -> ModelSpec:
    """Return the spec of Grok 1 or 2, as in the code that xAI published for both.

    Grok 2 multiplies the sum of MLP and experts by the square root of 1/2. The norm that follows removes this factor,
    except from its epsilon.
    """
    fields = fields.with_values({"hidden_activation": "gelu_pytorch_tanh"}).with_defaults(
        rms_norm_eps=1e-5, num_key_value_heads=8, max_position_embeddings=8192
    )
    size = fields.integer("intermediate_size")
    has_mlp = fields.boolean("residual_moe", False)
    experts = read_experts(
        fields,
        (8, 2, size),
        renormalizes=False,
        logit_softcap=fields.positive("router_logit_softcapping", 30.0),
        shared_intermediate_size=size if has_mlp else 0,
    )
    rope = read_rope(fields, head_dim(fields))
    eps = fields.positive("rms_norm_eps")
    layers = uniform_layers(fields, rope)
    if has_mlp:
        layers = tuple(replace(layer, output_norm_eps=(eps, 2 * eps)) for layer in layers)
    spec = base_spec(
        fields,
        layers,
        norms=NormNames("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm"),
        attention_scale=fields.positive("attn_output_multiplier", head_dim(fields) ** -0.5),
        attention_softcap=fields.optional_positive("attn_logit_softcapping") or 30.0,
        embedding_scale=fields.positive("embedding_multiplier_scale", 78.38367176906169),
        logits_divisor=1 / fields.positive("output_multiplier_scale", 0.5773502691896257),
        final_softcap=fields.optional_positive("final_logit_softcapping"),
    )
    return with_experts(spec, experts, tensor_names=_GROK_NAMES)


def _grove(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a GroveMoE: a Qwen3-MoE whose groups of experts have adjugate experts (arXiv 2508.07785).

    Published configs have neither the size of adjugate experts nor the number of experts of a group.
    """
    fields = fields.with_defaults(moe_intermediate_size=768, num_key_value_heads=4, head_dim=128)
    experts = read_experts(fields, (128, 8))
    group = fields.integer("num_experts_per_group", 2)
    if experts.num_experts % group:
        raise fields.wrong(
            "num_experts_per_group", f"a divisor of {experts.num_experts} experts", group
        )
    experts = replace(
        experts,
        adjugate_size=fields.integer("parallel_expert_intermediate_size", 128),
        adjugate_group=group,
        adjugate_scale=fields.positive("expert_group_scale", 0.05),
    )
    spec = base_spec(
        fields, qwen_layers(fields, lambda _: True), qk_norm="head", **attention_biases(fields)
    )
    return with_experts(spec, experts, has_sparse_step(fields), tensor_names=_GROVE_NAMES)


def _gpt_oss_puzzle(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a gpt-oss-puzzle: a gpt-oss whose layers have different windows and numbers of experts."""
    blocks = fields.get("block_configs")
    count = fields.layer_count("num_hidden_layers")
    if not isinstance(blocks, list) or len(blocks) != count:
        raise fields.wrong("block_configs", f"a list of {count} objects", blocks)
    spec = gpt_oss(fields.with_values({"layer_types": ["full_attention"] * count}))
    layers = []
    for layer, block in zip(spec.layers, blocks, strict=True):
        if not isinstance(block, dict):
            raise fields.wrong("block_configs", f"a list of {count} objects", blocks)
        own = ConfigFields(block, fields.path)
        experts = layer.experts
        assert experts is not None, "all layers of a gpt-oss have experts"
        chosen = experts.num_experts_per_token
        layers.append(
            replace(
                layer,
                window=own.optional_integer("sliding_window"),
                experts=replace(
                    experts, num_experts=own.integer("num_local_experts", minimum=chosen)
                ),
            )
        )
    return replace(spec, layers=tuple(layers), tensor_names=(*_PUZZLE_NAMES, *spec.tensor_names))


def _jetmoe(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a JetMoe (arXiv 2404.07413), whose attention has experts as well."""
    experts = read_experts(fields, (8, 2), intermediate_size="intermediate_size", has_sum_bias=True)
    kv_heads = fields.integer("num_key_value_heads", 16)
    fields = fields.with_values(
        {"num_attention_heads": kv_heads * experts.num_experts_per_token}
    ).with_defaults(head_dim=128, tie_word_embeddings=True, max_position_embeddings=4096)
    spec = base_spec(fields, uniform_layers(fields, read_rope(fields, head_dim(fields))))
    return with_experts(
        spec,
        experts,
        num_attention_experts=experts.num_experts,
        # Only the final norm has the epsilon of the config.
        norm_eps=1e-6,
        final_norm_eps=spec.norm_eps,
        tensor_names=_JETMOE_NAMES,
    )


def _k2_horizon(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a K2-Horizon, which norms parts of hidden states, and of which some have experts."""
    fields.require_all(mova_num_experts=0, use_sliding_window=False, attention_gate_func=None)
    fields = fields.with_defaults(num_key_value_heads=8, head_dim=128)
    size, hidden_size = head_dim(fields), fields.integer("hidden_size")
    num_groups = fields.integer("layernorm_num_groups")
    if hidden_size % num_groups:
        raise fields.wrong(
            "layernorm_num_groups", f"a divisor of hidden_size {hidden_size}", num_groups
        )
    has_norms = fields.boolean("query_key_norm", False)
    spec = llama(
        fields,
        layers=uniform_layers(fields, _k2_rope(fields, size)),
        norm_groups=num_groups,
        qk_norm="each head" if has_norms else None,
    )
    if not fields.integer("num_experts", 0, minimum=0):
        return spec
    scoring = fields.text("router_score_func", "sigmoid")
    if scoring not in ("sigmoid", "softmax"):
        raise fields.wrong("router_score_func", "sigmoid or softmax", scoring)
    shared = fields.integer("num_shared_experts", 0, minimum=0)
    experts = read_experts(
        fields,
        scoring=scoring,
        renormalizes=fields.boolean("norm_topk_prob", True),
        scale=fields.positive("router_scaling_factor", 1.0),
        has_correction_bias=fields.boolean("moe_gate_bias", True),
        shared_intermediate_size=shared * fields.integer("moe_intermediate_size"),
    )
    names = ((r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),)
    return with_experts(spec, experts, has_sparse_step(fields), tensor_names=names)


def _xverse_moe(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an XVERSE-MoE, or of a dense XVERSE, which has the same model type."""
    if fields.get("num_experts") is None:
        return llama(fields)
    size = fields.integer("intermediate_size")
    experts = read_experts(
        fields.with_defaults(num_experts_per_tok=fields.integer("moe_top_k", 6)),
        intermediate_size="intermediate_size",
        renormalizes=fields.boolean("norm_topk_prob", False),
        shared_intermediate_size=size * fields.integer("num_shared_experts", 0, minimum=0),
    )
    return with_experts(llama(fields), experts, tensor_names=((r"\.mlp\.router\.", ".mlp.gate."),))


_IQUEST_BLOCK = ("full_attention", *["sliding_attention"] * 3)


def _k2_rope(fields: ConfigFields, size: int) -> RopeSpec:
    """Return a K2-Horizon's rotation of `rope_head_dim` elements of a head: the first ones of both halves.

    In GGUF files, they are the first ones of the head.
    """
    rotated = fields.integer("rope_head_dim", size, maximum=size)
    if rotated == size or fields.boolean("rope_is_contiguous", False):
        partial = fields.with_values({"partial_rotary_factor": rotated / size})
        return read_rope(partial, size, partial=True)
    rope = read_rope(fields, size)
    if rope.scaling is not None:
        raise fields.wrong("rope_head_dim", f"head_dim {size} with a scaling of positions", rotated)
    # The frequencies are those of heads with as many elements as are rotated.
    scaling = ProportionalScaling(rotated // 2, 1.0)
    return replace(rope, theta=rope.theta ** (size / rotated), scaling=scaling)


def _iquest_q1(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an IQuest Q1. Each layer but the first replaces the residual stream by its norm."""
    fields.require_all(
        first_layer_attn_out_scale=1.0,
        first_layer_ffn_out_scale=1.0,
        attn_out_scale=1.0,
        mlp_only_layers=[0],
        use_over_encoding=False,
    )
    size, window = fields.integer("head_dim", 128), fields.integer("sliding_window", 4096)
    fields = fields.with_defaults(
        num_key_value_heads=8,
        head_dim=size,
        max_position_embeddings=524_288,
        moe_intermediate_size=fields.integer("intermediate_size", 1536),
    )
    experts = read_experts(fields, (256, 8), scale=fields.positive("ffn_out_scale", 0.53881590608))
    rotated = {"partial_rotary_factor": fields.integer("rotary_dim", 32, maximum=size) / size}
    full = read_rope(fields.with_values(rotated), size, theta=1_000_000.0, partial=True)
    local = read_rope(
        fields.with_values(
            rotated
            | {
                "rope_theta": fields.positive("swa_rope_theta", 10_000.0),
                "rope_parameters": None,
                "rope_scaling": None,
            }
        ),
        size,
        partial=True,
    )
    plain = read_layer_numbers(fields, "no_rope_layers") or set()
    norms = NormNames("attention_norm", "attn_out_norm", "feed_forward_norm")
    layers = []
    for i, slides in enumerate(_iquest_windows(fields)):
        rope = local if slides else full
        layers.append(
            LayerSpec(
                None if i in plain else rope,
                window if slides else None,
                replaces_stream=i > 0,
                norms=norms if i else replace(norms, mlp_output="ffn_out_norm"),
            )
        )
    dense = fields.integer("dense_intermediate_size", 12_288)
    spec = base_spec(
        fields.with_values({"intermediate_size": dense}),
        tuple(layers),
        norms=norms,
        qk_norm="head",
        num_sink_keys=int(fields.boolean("enable_sink_attention", True)),
        attention_scale=fields.optional_positive("softmax_scale") or size**-0.5,
        logits_divisor=1 / fields.positive("logit_scale", 1.0),
    )
    return with_experts(
        spec,
        experts,
        lambda i: i > 0,
        tensor_names=(
            (r"\.mlp\.router\.", ".mlp.gate."),
            (r"^mtp_layers\..*", ""),
        ),
    )


def _iquest_windows(fields: ConfigFields) -> list[bool]:
    """Return for each layer whether it has a window: the first layers, a repeated block, and the last layers."""
    count = fields.layer_count("num_hidden_layers")
    if not (
        fields.boolean("use_hybrid_layers", True) and fields.boolean("use_sliding_window", True)
    ):
        return [False] * count
    kinds = [
        *fields.get("first_layers_types", ["full_attention"]),
        *fields.get("hybrid_layers_types_block", _IQUEST_BLOCK)
        * fields.integer("num_hybrid_layers_block", 21, minimum=0),
        *fields.get("last_layers_types", ["full_attention"] * 3),
    ]
    if len(kinds) != count or not {"full_attention", "sliding_attention"}.issuperset(kinds):
        raise fields.wrong(
            "hybrid_layers_types_block", f"such that there are types of {count} layers", kinds
        )
    return [kind == "sliding_attention" for kind in kinds]


def _pangu_pro(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an openPangu Pro MoE V2, in which all tokens attend to stored keys as well."""
    rotated, plain = fields.integer("qk_rope_dim"), fields.integer("qk_nope_dim")
    size, value_dim = rotated + plain, fields.integer("v_channels")
    has_values = fields.boolean("param_sink_with_value", False)
    if value_dim >= size and has_values:
        raise fields.wrong("v_channels", f"less than qk_rope_dim + qk_nope_dim {size}", value_dim)
    bias = fields.boolean("attention_bias", fields.boolean("bias", False))
    fields = fields.with_defaults(rms_norm_eps=1e-5, n_shared_experts=0).with_values(
        {"head_dim": size, "partial_rotary_factor": rotated / size}
    )
    rope = read_rope(fields, size, partial=True)
    windows = fields.get("interleaved_sliding_window")
    windows = windows if isinstance(windows, list) else [windows]
    if not windows or not all(each is None or type(each) is int for each in windows):
        raise fields.wrong("interleaved_sliding_window", "a window or a list of windows", windows)
    norms = NormNames()
    if fields.boolean("sandwich_norm", False):
        norms = NormNames(
            attention_output="post_attention_layernorm",
            mlp_input="pre_mlp_layernorm",
            mlp_output="post_mlp_layernorm",
        )
    spec = base_spec(
        fields,
        tuple(
            LayerSpec(rope, window if window and window > 0 else None)
            for i in range(fields.layer_count("num_hidden_layers"))
            for window in [windows[i % len(windows)]]
        ),
        norms=norms,
        value_dim=None if value_dim == size else value_dim,
        rope_order="interleaved",
        qk_norm="only keys",
        qkv_bias=fields.boolean("qkv_bias", bias),
        attention_output_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        num_sink_keys=fields.integer("param_sink_number", 0, minimum=0),
        has_sink_values=has_values,
    )
    experts = replace(
        deepseek_experts(fields),
        num_groups=1,
        num_groups_per_token=1,
        has_correction_bias=fields.boolean("router_enable_expert_bias", False),
    )
    return with_experts(
        spec,
        experts,
        first_dense(fields, 1),
        tensor_names=(
            (r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),
            (r"\.k_layernorm\.", ".k_norm."),
            (r"\.param_sink_key$", ".sink_k"),
            (r"\.param_sink_value$", ".sink_v"),
            *unused_layers(fields),
        ),
    )


def _longcat_ngram(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a LongCat-Flash-Lite, a LongCat-Flash that also embeds n-grams."""
    spec = longcat(fields)
    ratio = fields.positive("ngram_vocab_size_ratio")
    ngrams = AveragedNgramSpec(
        longest=fields.integer("emb_neighbor_num", 4, minimum=2),
        num_heads=fields.integer("emb_split_num", 4),
        smallest_table=int(ratio * spec.vocab_size) + 1,
        end_id=fields.integer("eos_token_id", 2, minimum=0),
    )
    if spec.hidden_size % ngrams.num_tables:
        raise fields.error(
            f"hidden_size {spec.hidden_size} must be a multiple of emb_neighbor_num - 1 times emb_split_num, "
            f"{ngrams.num_tables}"
        )
    return replace(
        spec,
        averaged_ngrams=ngrams,
        tensor_names=(
            (r"\.ngram_embeddings\.embedders\.", ".embed_ngrams."),
            (r"\.ngram_embeddings\.post_projs\.", ".embed_ngram_projections."),
            # The embedding, which the model also has under its own name.
            (r".*\.ngram_embeddings\.word_embeddings\..*", ""),
            *spec.tensor_names,
        ),
    )


FAMILIES = (
    Family("ArcticForCausalLM", "arctic", _arctic),
    Family("GptOssPuzzleForCausalLM", "gpt_oss_puzzle", _gpt_oss_puzzle),
    Family("Grok1ForCausalLM", "grok-1", _grok),
    Family("GroveMoeForCausalLM", "grove_moe", _grove),
    Family("IQuestQ1ForCausalLM", "iquest_q1", _iquest_q1),
    Family("JetMoeForCausalLM", "jetmoe", _jetmoe),
    Family("K2HorizonForCausalLM", "k2_horizon", _k2_horizon),
    Family("LongcatFlashNgramForCausalLM", "longcat_flash_ngram", _longcat_ngram),
    Family("PanguProMoEV2ForCausalLM", "PanguProMoE", _pangu_pro),
    Family("XverseMoeForCausalLM", "xverse", _xverse_moe),
)
