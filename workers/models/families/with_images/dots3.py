"""dots3-note, whose layers with windows have latent attention of other sizes."""

from __future__ import annotations

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.layer_spec import LayerSpec
from ....layers.read_rope import read_rope_of_layer_type
from ....layers.spec import ModelSpec
from ....layers.specs.latent import IndexerSpec, LatentSpec
from ..common import Family
from ..experts import deepseek_experts, first_dense, has_listed_experts, with_experts
from ..latent import latent_spec


def _dots3_note(fields: ConfigFields) -> ModelSpec:
    count = fields.layer_count("num_hidden_layers")
    fields = fields.with_defaults(
        rms_norm_eps=1e-5, q_lora_rank=1024, n_shared_experts=1, first_k_dense_replace=1
    )
    rank = fields.integer("kv_lora_rank", 512)
    fields = fields.with_defaults(
        kv_lora_rank=rank, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    kinds = _layer_types(fields, count)
    indexer = IndexerSpec(
        fields.integer("index_n_heads", 64),
        fields.integer("index_head_dim", 128),
        fields.integer("index_topk", 2048),
        "interleaved",
    )
    dense = _layer(fields, "full_attention", 80_000_000.0)
    indexed = _layer(fields, "indexed_attention", 80_000_000.0)
    assert indexed.latent is not None and indexed.head_dim is not None
    latent = replace(indexed.latent, indexer=indexer)
    indexed = replace(indexed, latent=None, head_dim=None, chooses_keys=True)
    layers = {"indexed_attention": indexed, "full_attention": dense}
    if "sliding_attention" in kinds:
        window = fields.integer("sliding_window", fields.integer("sliding_window_size", 512))
        own = _layer(_local_fields(fields, kinds), "sliding_attention", 50_000.0)
        layers["sliding_attention"] = replace(own, window=window)
    has_indexers = "indexed_attention" in kinds
    size = fields.integer(
        "moe_shared_expert_intermediate_size",
        fields.integer("shared_experts_intermediate_size", 1536),
    )
    experts = replace(
        deepseek_experts(fields.with_defaults(n_routed_experts=256, moe_intermediate_size=1536)),
        shared_intermediate_size=size * fields.integer("n_shared_experts"),
    )
    spec = latent_spec(
        fields,
        layers=tuple(layers[kind] for kind in kinds),
        rope_order="interleaved",
        gates_attention=True,
        has_gate_projection=True,
        has_head_gates=True,
    )
    first, interval = first_dense(fields, 1), fields.get("moe_layer_freq", 1)

    def has_experts(i: int) -> bool:
        return first(i) and (bool(interval[i]) if isinstance(interval, list) else not i % interval)

    return with_experts(
        spec,
        experts,
        has_listed_experts(fields, has_experts),
        latent=latent if has_indexers else replace(latent, indexer=None),
        head_dim=spec.head_dim + indexer.head_dim * has_indexers,
        tensor_names=(
            (r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."),
            (r"\.k_rope_only_layernorm\.", ".k_rotated_norm."),
            (rf".*\.layers\.{count}\..*", ""),
            (r"^(model\.)?mtp\..*", ""),
        ),
    )


def _layer(fields: ConfigFields, kind: str, theta: float) -> LayerSpec:
    hidden_size = fields.integer("hidden_size")
    query_rank, rank = fields.integer("q_lora_rank"), fields.integer("kv_lora_rank")
    plain_dim = fields.integer("qk_nope_head_dim")
    rotary_dim = fields.integer("qk_rope_head_dim")
    local = "swa_rope_theta" if kind == "sliding_attention" else "rope_theta"
    # The norms of latent vectors in GGUF files contain these factors.
    has_factors = fields.boolean("apply_mla_qkv_lora_rescale", True)
    return LayerSpec(
        read_rope_of_layer_type(fields, kind, rotary_dim, theta_field=local, theta=theta),
        num_heads=fields.integer("num_attention_heads"),
        head_dim=rank + rotary_dim,
        # Normed query vectors have a factor that only depends on their size, as normed latent vectors have.
        attention_scale=(
            (plain_dim + rotary_dim) * (query_rank / hidden_size if has_factors else 1.0)
        )
        ** -0.5,
        latent=LatentSpec(
            query_rank,
            rank,
            plain_dim,
            rotary_dim,
            fields.integer("v_head_dim"),
            norm_eps=fields.number("rms_norm_eps"),
            multiplier=(hidden_size / rank) ** 0.5 if has_factors else 1.0,
            norms_rotated_key=True,
        ),
    )


def _layer_types(fields: ConfigFields, count: int) -> list[str]:
    """Return the layers' types. In published configs, "full_attention" means layers with indexers."""
    uses_indexers = fields.get("use_dsa", True if fields.get("per_layer_config") is None else None)
    has_windows = fields.boolean("use_sliding_window", True)
    full = "full_attention" if uses_indexers is False else "indexed_attention"
    kinds = fields.per_layer("layer_types", count)
    if kinds is None:
        return [
            full if not has_windows or i < 2 or i % 4 == 1 else "sliding_attention"
            for i in range(count)
        ]
    for kind in kinds:
        if kind not in ("full_attention", "indexed_attention", "sliding_attention"):
            needed = "full_attention, indexed_attention or sliding_attention for each layer"
            raise fields.wrong("layer_types", needed, kind)
    if uses_indexers is None:
        return list(kinds)
    return [kind if kind == "sliding_attention" else full for kind in kinds]


def _local_fields(fields: ConfigFields, kinds: list[str]) -> ConfigFields:
    """Return the fields with the sizes of sliding-window layers, which all have the same ones."""
    defaults = {
        "num_attention_heads": 64,
        "q_lora_rank": 1024,
        "kv_lora_rank": 1024,
        "qk_nope_head_dim": 192,
        "v_head_dim": 128,
    }
    own = fields.section("per_layer_config")
    first = None if own is None else own.section(str(kinds.index("sliding_attention")))
    if first is not None:
        names = (*defaults, "qk_rope_head_dim")
        return fields.with_values(
            {name: first.integer(name, fields.integer(name)) for name in names}
        )
    sizes = {name: fields.integer(f"swa_{name}", size) for name, size in defaults.items()}
    rest = fields.integer("swa_head_dim", 256) - sizes["qk_nope_head_dim"]
    sizes["qk_rope_head_dim"] = fields.integer("swa_qk_rope_head_dim", rest)
    return fields.with_values(sizes)


FAMILIES = (
    Family("Dots3NoteForCausalLM", "dots3_note_text", _dots3_note),
    Family("Dots3NoteForConditionalGeneration", "dots3_note", _dots3_note),
)
