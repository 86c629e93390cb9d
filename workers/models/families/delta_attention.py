"""Families with a delta rule in most layers, and latent or sparse attention in the others."""

from __future__ import annotations

from msgspec.structs import replace

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.lightning_config import LING_2_5
from ...layers.read_rope import read_rope
from ...layers.spec import ModelSpec
from ...layers.specs.attention_residuals import AttentionResidualsSpec
from ...layers.specs.block_indexer import BlockIndexerSpec
from ...layers.specs.experts import GateLimit, SoftCaps
from ...layers.specs.hyper import HyperConnectionsSpec
from ...layers.specs.latent import IndexerSpec
from ...layers.specs.ngram import NgramHashes, NgramSpec
from ...layers.specs.norm_names import NormNames
from .common import Family, head_dim, read_limits, with_limits
from .experts import (
    MIXTRAL_NAMES,
    deepseek_experts,
    first_dense,
    has_listed_experts,
    unused_layers,
    with_experts,
)
from .hybrid import QWEN3_5_AXES, layer_indices, mixed_layers, qwen3_next
from .latent import latent_spec, with_indexers
from .llama import interleaved_axes

_LING_NAMES = (
    (r"(^|\.)word_embeddings\.", r"\1embed_tokens."),
    (r"\.attention\.", ".self_attn."),
    (r"\.mlp\.gate\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
)


def _kimi_linear(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Kimi Linear, or of Kimi K3's decoder, which has attention residuals and soft caps, too."""
    caps = None
    if fields.get("hidden_act") == "situ":
        fields = fields.with_values({"hidden_act": "silu"})
        caps = SoftCaps(
            fields.optional_positive("activation_situ_beta") or 1.0,
            fields.optional_positive("activation_situ_linear_beta") or 0.0,
        )
    fields = fields.with_defaults(
        max_position_embeddings=fields.integer("model_max_length", 1_048_576),
        rms_norm_eps=1e-5,
        n_group=fields.integer("num_expert_group", 1),
        n_shared_experts=fields.integer("num_shared_experts", 1, minimum=0),
        num_experts_per_tok=fields.integer("num_experts_per_token", 8),
        norm_topk_prob=fields.boolean("moe_renormalize", True),
        routed_scaling_factor=2.446,
        moe_intermediate_size=1024,
        num_experts=256,
    )
    fields.require("mla_use_nope", True, ": latent attention has no rotation")
    fields.require_all(moe_router_activation_func="sigmoid", moe_layer_freq=1)
    own = fields.section("linear_attn_config")
    attending = None if own is None else layer_indices(own, "full_attn_layers")
    # This config numbers layers from 1.
    layers = mixed_layers(
        fields,
        None,
        lambda i: i + 1 in attending if attending is not None else i > 0 and i % 4 == 0,
        ("layer_types",),
    )
    recurrent = "|".join(str(i) for i, layer in enumerate(layers) if not layer.attends)
    spec = latent_spec(
        fields,
        layers=layers,
        # The same as in Nemotron-H.
        tie_word_embeddings=False,
        gates_attention=fields.boolean("mla_use_output_gate", False),
        has_gate_projection=True,
        soft_caps=caps,
        tensor_names=(
            (rf"\.layers\.({recurrent})\.self_attn\.", r".layers.\1.mixer."),
            (r"\.mixer\.o_proj\.", ".mixer.out_proj."),
            (r"\.mixer\.o_norm\.", ".mixer.norm."),
            (r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."),
            (r"\.self_attention_res_(proj|norm)\.", r".attn_res_\1."),
            # The first block reads one hidden state.
            (r".*\blayers\.0\.attn_res_.*", ""),
            (r"(^|\.)output_attn_res_(proj|norm)\.", r"\1head_res_\2."),
            (r"\.routed_expert_down_proj\.", ".to_latent."),
            (r"\.routed_expert_up_proj\.", ".from_latent."),
            (r"\.routed_expert_norm\.", ".latent_sum_norm."),
            *MIXTRAL_NAMES,
            *unused_layers(fields),
        ),
    )
    if (size := fields.optional_integer("attn_res_block_size")) is not None:
        residuals = AttentionResidualsSpec.for_layers(len(spec.layers), size, spec.norm_eps)
        spec = replace(spec, attention_residuals=residuals)
    experts = deepseek_experts(fields)
    if (latent_size := fields.optional_integer("routed_expert_hidden_size")) is not None:
        norms_sum = fields.boolean("latent_moe_use_norm", False)
        experts = replace(experts, latent_size=latent_size, norms_latent_sum=norms_sum)
    return with_experts(spec, experts, has_listed_experts(fields, first_dense(fields, 1)))


def _alice_ai(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an Alice AI: a Qwen3-Next with Kimi delta attention, attention residuals and other routers."""
    fields.require_all(
        kda_allow_negative_eigenvalues=False,
        router_score_function="sigmoid",
        router_bias_correction=True,
    )
    fields = fields.with_defaults(
        vocab_size=129_024, max_position_embeddings=262_144, rope_theta=1_000_000.0
    )
    spec = qwen3_next(fields)
    size = fields.integer("block_attn_res_block_size", 4)
    return replace(
        spec,
        layers=tuple(
            replace(
                layer,
                experts=replace(layer.experts, scoring="sigmoid", has_correction_bias=True),
            )
            if layer.experts is not None
            else layer
            for layer in spec.layers
        ),
        attention_residuals=AttentionResidualsSpec.for_layers(
            len(spec.layers), size, spec.norm_eps
        ),
        tensor_names=(
            *spec.tensor_names,
            (r"\.mixer\.a_log_bias$", ".mixer.A_log"),
            (r"\.mixer\.o_proj\.", ".mixer.out_proj."),
            (r"\.mixer\.o_norm\.", ".mixer.norm."),
            (r"_res_norm_weight$", "_res_norm.weight"),
            (r"(^|\.)attnres_final\.res_norm_weight$", r"\1head_res_norm.weight"),
            (r"(^|\.)attnres_final\.res_proj\.", r"\1head_res_proj."),
            (r"^(model\.)?mtp\..*", ""),
        ),
    )


def _ling3(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Ling 3: groups of layers, of which the last one has gated latent attention."""
    fields = fields.with_defaults(
        max_position_embeddings=fields.integer("model_max_length", 262_144),
        n_group=fields.integer("num_expert_group", 8),
        topk_group=4,
        n_shared_experts=fields.integer("num_shared_experts", 1, minimum=0),
        num_experts_per_tok=fields.integer("num_experts_per_token", 8),
        norm_topk_prob=fields.boolean("moe_renormalize", True),
        routed_scaling_factor=2.5,
        moe_intermediate_size=768,
        num_experts=512,
    )
    fields.require_all(
        gated_attention_proj_granularity_type="head_wise",
        up_proj_norm=False,
        use_kda_lora=False,
        use_mla_nope=False,
        use_nGPT=False,
        value_norm=False,
    )
    period = fields.integer("layer_group_size", 6)
    rope = read_rope(fields, fields.integer("qk_rope_head_dim", 64), theta=6_000_000.0)
    # Layers after the last whole group attend, too.
    num_whole = fields.layer_count("num_hidden_layers") // period * period
    layers = mixed_layers(fields, rope, lambda i: (i + 1) % period == 0 or i >= num_whole)
    recurrent = "|".join(str(i) for i, layer in enumerate(layers) if not layer.attends)
    spec = latent_spec(
        fields.with_defaults(
            kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
        layers=layers,
        rope_order="interleaved",
        # The same as in Nemotron-H.
        tie_word_embeddings=False,
        gates_attention=True,
        has_head_gates=True,
        tensor_names=(
            *_LING_NAMES,
            (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
            (r"\.self_attn\.forget_gate\.", ".self_attn."),
            (rf"\.layers\.({recurrent})\.self_attn\.", r".layers.\1.mixer."),
            (r"\.mixer\.o_proj\.", ".mixer.out_proj."),
            (r"\.mixer\.o_norm\.", ".mixer.norm."),
            (r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."),
            *unused_layers(fields),
        ),
    )
    return with_limits(
        with_experts(
            spec, deepseek_experts(fields), has_listed_experts(fields, first_dense(fields, 2))
        ),
        read_limits(fields, "expert_swiglu_limit_list"),
        read_limits(fields, "share_expert_swiglu_limit_list"),
    )


def _ling2_5(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Ling 2.5: layers with lightning attention, and one with latent attention in each group."""
    fields = fields.with_defaults(
        n_group=8,
        topk_group=4,
        n_shared_experts=fields.integer("num_shared_experts", 1, minimum=0),
        routed_scaling_factor=2.5,
    )
    fields.require_all(
        score_function="sigmoid",
        moe_shared_expert_intermediate_size=fields.integer("moe_intermediate_size"),
    )
    period = fields.integer("layer_group_size", 8)
    full = read_rope(fields, fields.integer("qk_rope_head_dim", 64), theta=600_000.0)
    rotation = read_rope(fields, head_dim(fields), theta=600_000.0, partial=True)
    num_whole = fields.layer_count("num_hidden_layers") // period * period
    layers = mixed_layers(fields, full, lambda i: (i + 1) % period == 0 or i >= num_whole)
    recurrent = "|".join(str(i) for i, layer in enumerate(layers) if not layer.attends)
    spec = latent_spec(
        fields.with_defaults(
            kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
        layers=tuple(layer if layer.attends else replace(layer, rope=rotation) for layer in layers),
        rope_order="interleaved",
        tensor_names=(
            *_LING_NAMES,
            (rf"\.layers\.({recurrent})\.self_attn\.", r".layers.\1.mixer."),
            (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
            (r"\.mixer\.dense\.", ".mixer.out_proj."),
            (r"\.mixer\.query_key_value\.", ".mixer.qkv_proj."),
            (r"\.mixer\.query_layernorm\.", ".mixer.q_norm."),
            (r"\.mixer\.key_layernorm\.", ".mixer.k_norm."),
            (r"\.mixer\.g_norm\.", ".mixer.norm."),
            (r"\.mixer\.g_proj\.", ".mixer.output_gate."),
            *unused_layers(fields),
        ),
    )
    has_experts = has_listed_experts(fields, first_dense(fields, 0))
    return with_experts(spec, deepseek_experts(fields), has_experts)


def _glm5_next(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a GLM-5.3-Flash: hyper-connections, and attention to groups of keys that indexers choose."""
    fields = fields.with_defaults(
        max_position_embeddings=1_048_576,
        rms_norm_eps=1e-5,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=256,
        qk_rope_head_dim=0,
        v_head_dim=256,
        n_routed_experts=288,
        n_shared_experts=1,
        moe_intermediate_size=2048,
        routed_scaling_factor=2.5,
        num_nextn_predict_layers=1,
    )
    if fields.integer("qk_rope_head_dim", minimum=0):
        raise fields.wrong("qk_rope_head_dim", "0", fields.get("qk_rope_head_dim"))
    count = fields.layer_count("num_hidden_layers")
    kinds = fields.per_layer("layer_types", count)
    if kinds is not None:
        kinds = ["full_attention" if kind == "indexed_attention" else kind for kind in kinds]
    # The config's head size is that of rotated elements.
    fields = fields.with_values(
        {"layer_types": kinds, "head_dim": fields.integer("qk_nope_head_dim")}
    )
    layers = mixed_layers(fields, None, lambda i: i % 4 == 3, ("layer_types",))
    recurrent = "|".join(str(i) for i, layer in enumerate(layers) if not layer.attends)
    spec = latent_spec(fields, layers=with_indexers(fields, layers))
    latent, indexer = spec.latent, _grouped_indexer(fields)
    assert latent is not None, "the family has latent attention"
    if latent.query_rank is None:
        raise fields.error("q_lora_rank is missing, but index queries are computed from its vector")
    pooling = r"\.indexer\.index_kpool_compress_"
    spec = replace(
        spec,
        latent=replace(latent, norm_eps=spec.norm_eps, indexer=indexer),
        head_dim=spec.head_dim + indexer.key_elements,
        hyper_connections=HyperConnectionsSpec(
            fields.integer("hc_mult", 4),
            eps=fields.number("hc_eps", 1e-6),
            num_iterations=fields.integer("hc_sinkhorn_iters", 20),
            averages_last=True,
        ),
        tensor_names=(
            *unused_layers(fields),
            (r"\.self_attn\.forget_gate\.", ".self_attn."),
            (rf"\.layers\.({recurrent})\.self_attn\.", r".layers.\1.mixer."),
            (r"\.mixer\.o_proj\.", ".mixer.out_proj."),
            (r"\.mixer\.o_norm\.", ".mixer.norm."),
            (r"\.hc_attn_", ".attn_hc."),
            (r"\.(hc_ffn_|ffn_hc\.)", ".mlp_hc."),
            (f".*{pooling}.*", "")
            if not indexer.has_groups
            else (f"{pooling}gate$", ".indexer.gate_proj.weight"),
            (rf"{pooling}ape(\.weight)?$", ".indexer.position_bias"),
        ),
    )
    limits = [GateLimit(fields.positive("swiglu_limit", 10.0))] * count
    has_experts = has_listed_experts(fields, first_dense(fields, 3))
    return with_limits(with_experts(spec, deepseek_experts(fields), has_experts), limits, limits)


def _grouped_indexer(fields: ConfigFields) -> IndexerSpec:
    size, num_keys = fields.integer("index_kpool", 16), fields.integer("index_topk", 2048)
    if num_keys % size:
        raise fields.error(f"index_topk {num_keys} must be a multiple of index_kpool {size}")
    fields.require("index_kpool_always_select_tail", True)
    return IndexerSpec(
        fields.integer("index_n_heads", 32),
        fields.integer("index_head_dim", 128),
        num_keys // size,
        group_size=size,
    )


def _qwen4(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Qwen4: a Qwen3-Next with hyper-connections, an indexer and embeddings of n-grams."""
    count = fields.layer_count("num_hidden_layers")
    fields = fields.with_defaults(intermediate_size=512, partial_rotary_factor=1.0, head_dim=256)
    kinds = fields.per_layer("layer_types", count)
    if kinds is not None:
        # The published config calls these layers full_attention.
        kinds = ["full_attention" if each == "indexed_attention" else each for each in kinds]
    fields = fields.with_values(
        {"layer_types": kinds, "mlp_only_layers": None, "decoder_sparse_step": 1}
    )
    spec = qwen3_next(fields)
    rotary_dim = max(layer.rope.rotary_dim for layer in spec.layers if layer.rope is not None)
    fields.integer("indexer_kv_heads", maximum=1)
    budget, block_size = fields.integer("indexer_budget"), fields.integer("indexer_compress_ratio")
    if budget % block_size:
        raise fields.error(
            f"indexer_budget {budget} must be a multiple of indexer_compress_ratio {block_size}"
        )
    indexer = BlockIndexerSpec(
        fields.integer("indexer_head_dim", minimum=rotary_dim, maximum=spec.head_dim),
        block_size,
        budget // block_size,
        num_local=0,
        num_heads=fields.integer("indexer_n_heads"),
        num_angles=rotary_dim // 2 if spec.rotary_axes else 0,
        has_two_matrices=fields.boolean("indexer_has_two_matrices", False),
    )
    if indexer.key_elements > spec.head_dim:
        most = f"at most head_dim {spec.head_dim} less {rotary_dim} rotated elements"
        raise fields.wrong("indexer_head_dim", most, indexer.head_dim)
    tables = _layers_with_ngrams(fields, spec)
    layers = (
        replace(
            layer,
            chooses_keys=layer.attends,
            ngram_table=tables.index(i) if i in tables else None,
        )
        for i, layer in enumerate(spec.layers)
    )
    return replace(
        spec,
        layers=tuple(layers),
        norms=NormNames(attention_input=None, mlp_input=None),
        has_final_norm=False,
        block_indexer=indexer,
        hyper_connections=HyperConnectionsSpec(
            fields.integer("hc_count", 4, minimum=2), rank=fields.integer("hc_lowrank", 320)
        ),
        ngrams=_ngrams(fields) if tables else None,
        tensor_names=(
            *spec.tensor_names,
            (r"\.(attn|mlp)_hyper_connection\.", r".\1_hc."),
            (r"(^|\.)hyper_connection_mixer\.", r"\1head_hc."),
            # These can be computed from the config.
            (r".*\.ple_embedding\.(layer_multipliers|ngram_heads_\w+)$", ""),
            (r"^(model\.)?mtp\..*", ""),
            # The table of a GGUF file belongs to the only layer that has one.
            *(
                (
                    r"(^|\.)embed_tokens_per_layer\.",
                    rf"\1layers.{i}.ple.ple_embedding.ngram_embedding.",
                )
                for i in tables[:1]
            ),
        ),
    )


def _qwen4_vl(fields: ConfigFields) -> ModelSpec:
    return _qwen4(interleaved_axes(fields, QWEN3_5_AXES))


def _layers_with_ngrams(fields: ConfigFields, spec: ModelSpec) -> list[int]:
    """Return the indices of the layers with embeddings of n-grams. The config numbers layers from 1."""
    numbers = layer_indices(fields, "ple_layer_ids") or []
    for number in numbers:
        is_layer = type(number) is int and 1 <= number <= len(spec.layers)
        if not is_layer or spec.layers[number - 1].attends:
            raise fields.wrong("ple_layer_ids", "numbers of layers with linear attention", numbers)
    return [number - 1 for number in sorted(set(numbers))]


def _ngrams(fields: ConfigFields) -> NgramSpec:
    end_ids = fields.token_ids("ple_eos_token_id") or fields.token_ids("eos_token_id")
    if not end_ids:
        raise fields.error(
            "eos_token_id is missing, before which no n-gram of ple_layer_ids begins"
        )
    ngrams = NgramSpec(
        longest=fields.integer("ngram_size", 3, minimum=2),
        num_heads=fields.integer("heads_per_ngram", 8),
        size=fields.integer("ple_embed_dim", fields.integer("hidden_size")),
        taps=fields.integer("ple_conv_kernel_size", 4),
        end_id=end_ids[0],
        seed=fields.integer("seed", 1234, minimum=0),
        smallest_head=fields.integer("ngram_vocab_size_base", 20_000_000),
        divisor=fields.integer("make_ngram_vocab_size_divisible_by", 128),
        hashes=_ngram_hashes(fields),
    )
    if ngrams.size % ngrams.num_all_heads:
        raise fields.error(
            f"ple_embed_dim {ngrams.size} must be a multiple of ngram_size - 1 times heads_per_ngram, "
            f"{ngrams.num_all_heads}"
        )
    return ngrams


def _ngram_hashes(fields: ConfigFields) -> tuple[NgramHashes, ...]:
    """Return the constants of hashes that the config of a GGUF file has, which belong to its only table."""
    own = fields.section("ngram_hashes")
    if own is None:
        return ()
    multipliers, sizes = own.get("multipliers"), own.get("head_sizes")
    return (NgramHashes(tuple(multipliers), tuple(sizes), own.integer("num_rows")),)


FAMILIES = (
    Family("AliceAIForCausalLM", "alice_ai", _alice_ai),
    Family("BailingHybridForCausalLM", "bailing_hybrid", _ling3),
    Family(LING_2_5, "bailing_hybrid", _ling2_5),
    Family("BailingMoeV3ForCausalLM", "bailing_hybrid", _ling3),
    Family("Glm5NextForCausalLM", "glm5_next_text", _glm5_next),
    Family("Glm5NextForConditionalGeneration", "glm5_next_text", _glm5_next),
    Family("KimiLinearForCausalLM", "kimi_linear", _kimi_linear),
    Family("Qwen4ExpForCausalLM", "qwen4_exp_text", _qwen4),
    Family("Qwen4ExpForConditionalGeneration", "qwen4_exp", _qwen4_vl),
)
