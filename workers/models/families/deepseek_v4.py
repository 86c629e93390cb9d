"""DeepSeek-V4: compressed attention, hyper-connections, and first layers whose experts are chosen by the token.

DeepSeek-V4.1: layers that share entries and choices, delayed hyper-connections, and embeddings of n-grams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from ....protocol.checkpoint.config_fields import ConfigFields
from ...layers.layer_spec import LayerSpec
from ...layers.read_rope import read_rope
from ...layers.rope import RopeSpec, YarnScaling
from ...layers.spec import ModelSpec
from ...layers.specs.compressed import Candidates, CompressedSpec, Compression
from ...layers.specs.experts import GateLimit
from ...layers.specs.hyper import HyperConnectionsSpec
from ...layers.specs.latent import IndexerSpec
from ...layers.specs.ngram import NgramHashes, NgramSpec, primes_from
from .common import Family, base_spec, head_dim
from .experts import read_experts, unused_layers
from .hybrid import layer_indices

_KINDS = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}
"""The types of layers by the number of tokens that an entry summarizes."""
_SCORINGS = {"sqrtsoftplus": "sqrt softplus", "sigmoid": "sigmoid", "softmax": "softmax"}
_NAMES = (
    (r"^embed\.", "embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^hc_head_", "head_hc."),
    (r"(^|\.)hc_head\.hc_", r"\1head_hc."),
    (r"(^|\.)mtp\..*", ""),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_attn_", ".attn_hc."),
    (r"\.hc_ffn_", ".mlp_hc."),
    (r"\.ffn_hc\.", ".mlp_hc."),
    (r"\.self_attn\.indexer\.(compressor\.)?", ".self_attn.compressor.indexer."),
    (r"\.indexer\.scorer\.", ".indexer."),
    (r"\.(self_attn|compressor|indexer)\.norm\.", r".\1.kv_norm."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.ape$", ".position_bias"),
    (r"\.w(q|o)_(a|b)\.", r".\1_\2_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
)


_NAMES_OF_4_1 = (
    # The tower, and what image tokens add to the scores of experts.
    (r"^(vision|aligner)\..*", ""),
    (r"^image_(start|end|newline)$", ""),
    (r".*\.gate\.bias_vl$", ""),
    (r"\.engram\.embed\.", ".ple.ple_embedding.ngram_embedding."),
    (r"\.engram\.wkv\.", ".ple.kv_proj."),
    (r"\.engram\.q_weight$", ".ple.norm_query.weight"),
    (r"\.engram\.k_weight$", ".ple.norm_key.weight"),
    (r"\.indexer\.wk\.", ".indexer.k_proj."),
)


def _deepseek_v4(fields: ConfigFields) -> ModelSpec:
    return _with_experts(fields, _attention(fields), _layers)


def _deepseek_v4_1(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_values({"num_hash_layers": 0, "mlp_layer_types": None})
    compressed = replace(_attention(fields), norms_queries=False, candidates=_candidates(fields))
    spec = _with_experts(fields, compressed, _sharing_layers)
    assert spec.hyper_connections is not None
    tables = _indices(fields, "engram_layer_ids")
    if max(tables, default=0) >= len(spec.layers):
        raise fields.wrong("engram_layer_ids", f"indices of {len(spec.layers)} layers", tables)
    layers = (
        replace(layer, ngram_table=tables.index(i) if i in tables else None)
        for i, layer in enumerate(spec.layers)
    )
    return replace(
        spec,
        layers=tuple(layers),
        hyper_connections=replace(spec.hyper_connections, delayed=True),
        ngrams=_ngrams(fields, tables) if tables else None,
        tensor_names=(*_NAMES_OF_4_1, *spec.tensor_names),
    )


def _indices(fields: ConfigFields, name: str) -> list[int]:
    """Return a field that lists layers, or an empty list if it is absent."""
    indices = layer_indices(fields, name) or []
    if not all(type(each) is int and each >= 0 for each in indices):
        raise fields.wrong(name, "a list of indices of layers", indices)
    return indices


def _candidates(fields: ConfigFields) -> Candidates | None:
    """Return the blocks among which entries are chosen, or None. They must have room for all chosen entries."""
    count = fields.integer("candidate_topk_blocks", 0, minimum=0)
    if fields.integer("candidate_source_layer_id", -1, minimum=-1) < 0 or not count:
        return None
    size = fields.integer("candidate_block_size")
    fields.integer("index_topk", 512, maximum=count * size)
    return Candidates(count, size)


def _ngrams(fields: ConfigFields, tables: Sequence[int]) -> NgramSpec:
    """Return the embeddings of n-grams of these layers. Their hashes are those of the publisher."""
    longest = fields.integer("engram_max_ngram_size", minimum=2)
    heads = fields.integer("engram_n_heads")
    num_classes = fields.integer("engram_compressed_vocab_size")
    limit = max(1, np.iinfo(np.int64).max // num_classes // 2)
    count = (longest - 1) * heads
    primes = primes_from(fields.integer("engram_vocab_size"), count * len(tables))
    sizes = fields.per_layer("engram_num_embeddings", len(tables)) or []
    hashes = []
    for table, layer in enumerate(tables):
        own = primes[table * count : (table + 1) * count]
        if not sizes or type(sizes[table]) is not int or sizes[table] < sum(own):
            raise fields.wrong(
                "engram_num_embeddings", f"at least {sum(own)} for layer {layer}", sizes
            )
        numbers = np.random.default_rng(10007 * layer).integers(0, limit, longest)
        hashes.append(NgramHashes(tuple((2 * numbers + 1).tolist()), own, sizes[table]))
    return NgramSpec(
        longest,
        heads,
        size=count * fields.integer("engram_head_dim"),
        taps=0,
        end_id=fields.integer("engram_pad_token_id", minimum=0),
        hashes=tuple(hashes),
        num_classes=num_classes,
    )


def _with_experts(
    fields: ConfigFields,
    compressed: CompressedSpec,
    read_layers: Callable[[ConfigFields, CompressedSpec], list[LayerSpec]],
) -> ModelSpec:
    """Return the spec of layers that `read_layers` reads without their experts."""
    size = fields.integer("moe_intermediate_size", 2048)
    fields = fields.with_defaults(
        intermediate_size=size,
        num_key_value_heads=1,
        head_dim=512,
        max_position_embeddings=1 << 20,
        moe_intermediate_size=size,
    )
    scoring = fields.text("scoring_func", "sqrtsoftplus")
    if scoring not in _SCORINGS:
        raise fields.wrong("scoring_func", " or ".join(_SCORINGS), scoring)
    fields.require("mlp_bias", False)
    if fields.integer("num_key_value_heads") != 1:
        raise fields.wrong("num_key_value_heads", "1", fields.get("num_key_value_heads"))
    limit = fields.number("swiglu_limit", 10.0)
    gate_limit = GateLimit(limit) if limit > 0 else None
    experts = read_experts(
        fields,
        (256, 6),
        scoring=_SCORINGS[scoring],
        scale=fields.positive("routed_scaling_factor", 1.5),
        has_correction_bias=True,
        shared_intermediate_size=size * fields.integer("n_shared_experts", 1, minimum=0),
        gate_limit=gate_limit,
    )
    hashed = replace(experts, has_correction_bias=False, is_hashed=True)
    layers = tuple(
        replace(layer, gate_limit=gate_limit, experts=hashed if is_hashed else experts)
        for layer, is_hashed in zip(
            read_layers(fields, compressed), _hashed_layers(fields), strict=True
        )
    )
    return base_spec(
        fields,
        layers,
        compressed=compressed,
        hyper_connections=HyperConnectionsSpec(
            fields.integer("hc_mult", 4),
            eps=fields.number("hc_eps", 1e-6),
            num_iterations=fields.integer("hc_sinkhorn_iters", 20),
        ),
        tensor_names=(*_NAMES, *unused_layers(fields.with_defaults(num_nextn_predict_layers=1))),
    )


def _attention(fields: ConfigFields) -> CompressedSpec:
    size, heads = head_dim(fields), fields.integer("num_attention_heads")
    default = fields.integer("qk_rope_head_dim", size // 8)
    rotary_dim = int(size * fields.positive("partial_rotary_factor", default / size))
    indexer = IndexerSpec(
        fields.integer("index_n_heads", 64),
        fields.integer("index_head_dim", 128),
        fields.integer("index_topk", 512),
    )
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > min(size, indexer.head_dim):
        raise fields.error(
            f"partial_rotary_factor gives {rotary_dim} rotated elements; they must be even, at least 2, and at most "
            f"head_dim {size} and index_head_dim {indexer.head_dim}"
        )
    groups = fields.integer("o_groups", 8)
    if heads % groups:
        raise fields.error(f"num_attention_heads {heads} must be a multiple of o_groups {groups}")
    return CompressedSpec(
        fields.integer("q_lora_rank", 1024),
        rotary_dim,
        groups,
        fields.integer("o_lora_rank", 1024),
        fields.integer("sliding_window", 128),
        indexer,
    )


def _layers(fields: ConfigFields, compressed: CompressedSpec) -> list[LayerSpec]:
    """Return the layers without experts. Keys stay in the cache for as long as they, or their inputs, are read."""
    count = fields.layer_count("num_hidden_layers")
    rates = fields.section_or_empty("compress_rates")
    kinds: dict[str, Compression | None] = {
        "sliding_attention": None,
        "compressed_sparse_attention": Compression(
            rates.integer("compressed_sparse_attention", fields.integer("compress_rate_csa", 4)),
            overlaps=True,
            has_indexer=True,
        ),
        "heavily_compressed_attention": Compression(
            rates.integer("heavily_compressed_attention", fields.integer("compress_rate_hca", 128)),
            overlaps=False,
            has_indexer=False,
        ),
    }
    main, compressing = _ropes(fields, compressed.rotary_dim)
    layers = []
    for kind in _layer_types(fields, count):
        if kind not in kinds:
            raise fields.error(f"layer_types has {kind!r}; supported are {', '.join(kinds)}")
        compression, window = kinds[kind], compressed.window
        if compression is None:
            layers.append(LayerSpec(main, window))
        else:
            window = max(window, compression.span)
            layers.append(LayerSpec(compressing, window, compression=compression))
    return layers


def _sharing_layers(fields: ConfigFields, compressed: CompressedSpec) -> list[LayerSpec]:
    """Return the layers without experts. Those with entries read those of the last source."""
    count = fields.layer_count("num_hidden_layers")
    rates = fields.get("compress_ratios")
    rates = rates[:count] if isinstance(rates, list) else []
    if len(rates) < count or not all(type(x) is int and x >= 0 for x in rates):
        raise fields.wrong(
            "compress_ratios", f"an integer of at least 0 for each of {count} layers", rates
        )
    sources, choosing = (
        {i for i in _indices(fields, f"{name}_source_layer_ids") if i < count}
        for name in ("kv", "index")
    )
    if not sources <= choosing:
        raise fields.wrong(
            "kv_source_layer_ids", "layers of index_source_layer_ids", sorted(sources)
        )
    main, compressing = _ropes(fields, compressed.rotary_dim)
    filter_layer = fields.integer("candidate_source_layer_id", -1, minimum=-1)
    layers = []
    for i, rate in enumerate(rates):
        if not rate:
            layers.append(LayerSpec(main, compressed.window))
            continue
        source = max((each for each in sources if each <= i), default=None)
        if source is None or rates[source] != rate:
            raise fields.error(
                f"layer {i} has compress_ratios {rate}, but no layer of kv_source_layer_ids with that ratio is the last "
                "one up to it"
            )
        chooses, is_filtered = i in choosing, 0 <= filter_layer < i
        if (
            chooses
            and is_filtered
            and (rates[filter_layer] != rate or filter_layer not in choosing)
        ):
            raise fields.wrong(
                "candidate_source_layer_id",
                f"an index source with the ratio of layer {i}",
                filter_layer,
            )
        compression = Compression(
            rate,
            overlaps=False,
            has_indexer=True,
            chooses=chooses,
            source=None if source == i else source,
            keeps_candidates=i == filter_layer,
            candidate_source=filter_layer if chooses and is_filtered else None,
            derives_index_keys=True,
        )
        window = max(compressed.window, compression.span)
        layers.append(LayerSpec(compressing, window, compression=compression))
    return layers


def _layer_types(fields: ConfigFields, count: int) -> list[Any]:
    found = fields.per_layer("layer_types", count)
    if found is not None:
        return found
    ratios = fields.get("compress_ratios")
    if ratios is None:
        return [
            "compressed_sparse_attention" if i >= 2 and i % 2 else "heavily_compressed_attention"
            for i in range(count)
        ]
    # The layers after the last are for multi-token prediction.
    used = ratios[:count] if isinstance(ratios, list) else []
    if len(used) < count or not all(type(x) is int and x in _KINDS for x in used):
        raise fields.wrong("compress_ratios", f"0, 4 or 128 for each of {count} layers", ratios)
    return [_KINDS[x] for x in used]


def _hashed_layers(fields: ConfigFields) -> list[bool]:
    count = fields.layer_count("num_hidden_layers")
    kinds = fields.per_layer("mlp_layer_types", count)
    if kinds is None:
        first = fields.integer("num_hash_layers", 3, minimum=0)
        return [i < first for i in range(count)]
    if not {"hash_moe", "moe"}.issuperset(kinds):
        raise fields.error(f"mlp_layer_types must be hash_moe or moe for each layer, got {kinds!r}")
    return [kind == "hash_moe" for kind in kinds]


def _ropes(fields: ConfigFields, rotary_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """Return the rotary embeddings of layers without entries, and of layers with entries.

    Without sections, only those of layers with entries are extended to longer contexts, and YaRN does not change their
    scores.
    """
    nested = fields.section("rope_parameters")
    scaling = fields.first_section("rope_scaling", "rope_parameters").config
    main: dict[str, Any] = {}
    if nested is not None and nested.section("main") is not None:
        main = dict(nested.required_section("main").config)
        scaling = nested.required_section("compress").config
    else:
        scaling = {"attention_factor": 1.0} | {
            k: v for k, v in scaling.items() if k != "rope_theta"
        }
    # Transformers reads this field only outside of sections, and divides all rotary parameters into sections.
    main, scaling = ({k: v for k, v in each.items() if k != "truncate"} for each in (main, scaling))
    theta = fields.positive("rope_theta", 10_000.0, above=1)
    base = fields.with_values({"rope_scaling": None, "rope_theta": None})
    of_entries = read_rope(
        base.with_values({"rope_parameters": scaling or None}),
        rotary_dim,
        theta=fields.positive("compress_rope_theta", 160_000.0, above=1),
    )
    if not isinstance(of_entries.scaling, YarnScaling | None):
        raise fields.error(
            "only the rope types default and yarn are supported for DeepSeek-V4; use a model with one of them"
        )
    of_main = read_rope(
        base.with_values({"rope_parameters": main or None}), rotary_dim, theta=theta
    )
    return of_main, of_entries


FAMILIES = (
    Family("DeepseekV4ForCausalLM", "deepseek_v4", _deepseek_v4),
    Family("DeepseekV41ForCausalLM", "deepseek_v41", _deepseek_v4_1),
)
