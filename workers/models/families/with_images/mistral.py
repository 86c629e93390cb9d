"""Mistral Large 4, whose latent attention is sparse and whose layers may share keys and values."""

from __future__ import annotations

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.layer_spec import LayerSpec
from ....layers.read_rope import read_rope
from ....layers.spec import ModelSpec
from ....layers.specs.latent import IndexerSpec
from ....loaders.stored.mistral import DECODER_NAMES
from ..common import Family
from ..experts import first_dense, has_listed_experts, with_experts
from ..latent import latent_spec, mistral_experts, with_indexers

_NAMES = (
    (r".*mtp_dspark\..*", ""),
    (r"^lerope\.", "model.rotary_emb."),
    *DECODER_NAMES,
    (r"\.ssmax_scaling\.s$", ".softmax_scaling.scale"),
    (r"\.ssmax_scaling\.b$", ".softmax_scaling.bias"),
)


def _mistral_large4(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        rms_norm_eps=1e-5,
        n_shared_experts=1,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2048.0,
            "original_max_position_embeddings": 512,
            "attention_factor": 1.0,
        },
    ).with_values({"q_lora_rank": None})
    rope = replace(read_rope(fields, fields.integer("qk_rope_head_dim")), has_factors=True)
    layers = tuple(LayerSpec(rope if rotates else None) for rotates in _rotating_layers(fields))
    spec = latent_spec(
        fields,
        layers=with_indexers(fields, _with_sources(fields, layers)),
        rope_order="interleaved",
        final_softcap=fields.positive("final_logit_softcapping", 30.0),
    )
    indexer = IndexerSpec(
        fields.integer("index_n_heads", 32),
        fields.integer("index_head_dim", 128, minimum=rope.rotary_dim),
        fields.integer("index_topk", 2048),
        rope_order="interleaved",
        norms_inputs=True,
        has_log_scales=True,
    )
    assert spec.latent is not None
    latent = replace(
        spec.latent,
        norm_eps=spec.norm_eps,
        indexer=indexer,
        has_log_scales=True,
        has_plain_layers=True,
    )
    return with_experts(
        spec,
        mistral_experts(fields, renormalizes=True),
        has_listed_experts(fields, first_dense(fields, 1)),
        latent=latent,
        head_dim=spec.head_dim + indexer.head_dim,
        tensor_names=_NAMES,
    )


def _rotating_layers(fields: ConfigFields) -> list[bool]:
    count = fields.layer_count("num_hidden_layers")
    rotates = fields.get("no_rope_layers")
    if rotates is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        return [(i + 1) % interval != 0 for i in range(count)]
    if not isinstance(rotates, list) or len(rotates) < count or not {0, 1}.issuperset(rotates):
        raise fields.wrong("no_rope_layers", f"0 or 1 for each of {count} layers", rotates)
    return [bool(each) for each in rotates[:count]]


def _with_sources(fields: ConfigFields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Return the layers with their `kv_source`.

    Transformers keeps the keys of one source with a rotary embedding and of one without, those that it computed last.
    """
    sources = fields.per_layer("kv_source_layers", len(layers))
    if sources is None:
        return layers
    latest: dict[bool, int] = {}
    shared = list(layers)
    for i, (layer, source) in enumerate(zip(layers, sources, strict=True)):
        if source != i:
            expected = latest.get(layer.rope is not None)
            if source != expected:
                raise fields.wrong(
                    f"kv_source_layers[{i}]",
                    f"{i} for keys of its own, or {expected}, the last earlier layer with keys of the same kind",
                    source,
                )
            shared[i] = replace(layer, kv_source=source)
        elif i in sources[i + 1 :]:
            latest[layer.rope is not None] = i
    return tuple(shared)


FAMILIES = (Family("MistralLarge4ForConditionalGeneration", "mistral_large4", _mistral_large4),)
