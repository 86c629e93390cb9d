"""Families of bidirectional text encoders with rotary positions."""

from __future__ import annotations

from typing import Any

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.checkpoint.pooling.embedding import LATE
from ....layers.layer_spec import LayerSpec
from ....layers.read_rope import read_rope, read_rope_of_layer_type
from ....layers.spec import ModelSpec
from ....layers.specs.experts import ExpertsSpec
from ....layers.specs.norm_names import NormNames
from ..common import (
    Family,
    attention_biases,
    base_spec,
    head_dim,
    read_activation,
    sliding_layers,
    uniform_layers,
    windowed_layers,
    with_score_head,
)
from ..experts import with_experts
from ..llama import llama
from .absolute import BERT_NAMES, POST_NORMED, bert, roberta
from .heads import (
    AFTER_POOLER,
    WITH_HIDDEN_ACT_DENSE,
    WITH_OWN_DENSE,
    HeadNames,
    encoder_families,
    with_splade_head,
)

_MODERNBERT_NORMS = NormNames("attention_norm", None, "mlp_norm", None)
_MODERNBERT_NAMES = (
    (r"^(.*\.)?(head|decoder|classifier)\..*", ""),
    (r"embeddings\.tok_embeddings\.", "embed_tokens."),
    (r"embeddings\.norm\.", "embed_norm."),
    (r"final_norm\.", "norm."),
    (r"\.attn_norm\.", ".attention_norm."),
    (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
    (r"\.attn\.Wo\.", ".self_attn.o_proj."),
    (r"\.mlp\.Wi\.", ".mlp.gate_up_proj."),
    (r"\.mlp\.Wo\.", ".mlp.down_proj."),
)
_MODERNBERT_DECODER_NAMES = (
    (r"^lm_head\.dense\.", "model.head_dense."),
    (r"^lm_head\.norm\.", "model.head_norm."),
    (r"^decoder\.", "lm_head."),
    *_MODERNBERT_NAMES,
    (r"\.attn\.([qkv])_proj\.", r".self_attn.\1_proj."),
)
_POST_NORMED_NAMES = (
    (r"^(.*\.)?(pooler|cls|lm_head|classifier|qa_outputs)\..*", ""),
    (r"embeddings\.word_embeddings\.", "embed_tokens."),
    (r"embeddings\.token_type_embeddings\.", "embed_token_types."),
    (r"embeddings\.LayerNorm\.", "embed_norm."),
    (r"emb_ln\.", "embed_norm."),
    (r"encoder\.layers?\.", "layers."),
    (r"\.(attn|attention|mixer)\.(Wqkv|qkv_proj)\.", ".self_attn.qkv_proj."),
    (r"\.(attn|attention|mixer)\.(out_proj|o_proj)\.", ".self_attn.o_proj."),
    (r"\.(norm1|attn_ln|post_attention_layernorm)\.", ".attention_norm."),
    (r"\.(norm2|mlp_ln|post_mlp_layernorm)\.", ".mlp_norm."),
)
_NOMIC_NAMES = (
    *_POST_NORMED_NAMES,
    (r"\.fc11\.", ".up_proj."),
    (r"\.fc12\.", ".gate_proj."),
    (r"\.fc2\.", ".down_proj."),
)
_ROFORMER_NAMES = (
    (r".*encoder\.embed_positions\.weight$", ""),
    (r"embeddings_project\.", "embed_projection."),
    *BERT_NAMES,
)
_JINA_NAMES = (
    *_POST_NORMED_NAMES,
    (r"\.mlp\.fc1\.", ".mlp.up_proj."),
    (r"\.mlp\.fc2\.", ".mlp.down_proj."),
)
_NOMIC_MIXTURE_NAMES = (
    (r"\.mlp\.router\.layer\.", ".mlp.gate."),
    (r"(\.experts\.\d+)\.gate_proj\.", r"\1.up_proj."),
    *_JINA_NAMES,
)
_NEOBERT_NAMES = (
    (r"^(decoder|dense|classifier)\..*", ""),
    (r"^((?:model\.)?)encoder\.", r"\1embed_tokens."),
    (r"^((?:model\.)?)layer_norm\.", r"\1norm."),
    (r"transformer_encoder\.", "layers."),
    (r"\.qkv\.", ".self_attn.qkv_proj."),
    (r"\.wo\.", ".self_attn.o_proj."),
    (r"\.ffn\.w12\.", ".mlp.gate_up_proj."),
    (r"\.ffn\.w3\.", ".mlp.down_proj."),
)
_NOMIC_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu"}


def _modernbert(fields: ConfigFields, *, is_causal: bool = False, **differences: Any) -> ModelSpec:
    fields = fields.with_defaults(
        hidden_activation="gelu",
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    size = head_dim(fields)
    ropes = [
        read_rope_of_layer_type(fields, kind, size, theta_field=field, theta=theta)
        for kind, field, theta in (
            ("full_attention", "global_rope_theta", 160_000.0),
            ("sliding_attention", "local_rope_theta", 10_000.0),
        )
    ]
    window = fields.integer("local_attention", 128, minimum=2) // 2
    if is_causal:
        window = fields.integer("sliding_window", window)
    else:
        # The window extends this far before and after a token.
        window += 1
    period = fields.integer("global_attn_every_n_layers", 3)
    layers = [
        LayerSpec(ropes[1], window) if slides else LayerSpec(ropes[0])
        for slides in sliding_layers(fields, lambda i: i % period != 0)
    ]
    # The first layer needs no norm, because its input, the embedding, is normed already.
    first = NormNames(None, None, _MODERNBERT_NORMS.mlp_input, None)
    layers[0] = LayerSpec(layers[0].rope, layers[0].window, norms=first)
    common = {"tensor_names": _MODERNBERT_NAMES} | attention_biases(fields)
    return base_spec(
        fields,
        tuple(layers),
        is_causal=is_causal,
        norms=_MODERNBERT_NORMS,
        norm_kind="layer",
        norm_bias=fields.boolean("norm_bias", False),
        has_embedding_norm=True,
        mlp_bias=fields.boolean("mlp_bias", False),
        **common | differences,
    )


def _modernbert_decoder(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a ModernBERT decoder (Ettin, arXiv 2507.11412)."""
    activation = fields.text("hidden_activation", "gelu")
    if (of_head := fields.text("classifier_activation", "gelu")) != activation:
        raise fields.error(
            f"classifier_activation {of_head!r} is supported only if hidden_activation is the same, "
            f"got {activation!r}"
        )
    return _modernbert(
        fields,
        is_causal=True,
        head_dense_bias=fields.boolean("classifier_bias", False),
        head_bias=fields.boolean("decoder_bias", True),
        tensor_names=_MODERNBERT_DECODER_NAMES,
    )


def _modernbert_decoder_classifier(fields: ConfigFields) -> ModelSpec:
    has_bias = fields.boolean("classifier_bias", False)
    return with_score_head(
        _modernbert_decoder(fields),
        fields,
        dense=r"^head\.dense\.",
        dense_bias=has_bias,
        activation=read_activation(fields, "classifier_activation", "gelu"),
        norm=r"^head\.norm\.",
        output=r"^classifier\.",
        output_bias=has_bias,
    )


def _modernbert_classifier(fields: ConfigFields) -> ModelSpec:
    return with_score_head(
        _modernbert(fields),
        fields,
        dense=r"^head\.dense\.",
        dense_bias=fields.boolean("classifier_bias", False),
        activation=read_activation(fields, "classifier_activation", "gelu"),
        norm=r"^head\.norm\.",
        output=r"^classifier\.",
        output_bias=True,
    )


def _modernbert_splade(fields: ConfigFields) -> ModelSpec:
    return with_splade_head(
        _modernbert(fields),
        fields,
        dense=r"^head\.dense\.",
        dense_bias=fields.boolean("classifier_bias", False),
        activation=read_activation(fields, "classifier_activation", "gelu"),
        norm=r"^head\.norm\.",
        bias=r"^decoder\.(?=bias$)" if fields.boolean("decoder_bias", True) else None,
    )


def _post_normed(fields: ConfigFields, theta: float, **differences: Any) -> ModelSpec:
    """Return the spec of a BERT model with rotary positions."""
    rope = read_rope(_with_ntk_scaling(fields), head_dim(fields), theta=theta)
    return base_spec(
        fields,
        uniform_layers(fields, rope),
        **POST_NORMED
        | {
            "num_token_types": fields.integer("type_vocab_size", minimum=0),
            "tensor_names": _POST_NORMED_NAMES,
        }
        | differences,
    )


def _with_ntk_scaling(fields: ConfigFields) -> ConfigFields:
    """Return the fields with GTE's NTK scaling replaced by an equivalent larger base and linear scaling."""
    scaling = fields.section("rope_scaling")
    if scaling is None or scaling.text("type", scaling.text("rope_type", "")) != "ntk":
        return fields
    factor, size = scaling.positive("factor"), head_dim(fields)
    return fields.with_values(
        {
            "rope_theta": fields.positive("rope_theta", 10_000.0) * factor,
            "rope_scaling": {"rope_type": "linear", "factor": factor ** (2 / size)},
        }
    )


def _nomic(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(rms_norm_eps=1e-12, hidden_act="silu", type_vocab_size=2)
    for name, expected in (
        ("prenorm", False),
        ("parallel_block", False),
        ("use_rms_norm", False),
        ("rotary_emb_fraction", 1.0),
        ("rotary_emb_interleaved", False),
        ("rotary_scaling_factor", None),
    ):
        if fields.get(name, expected) not in (expected, None):
            raise fields.error(f"{name} {fields.get(name)!r} is not supported; use {expected!r}")
    fields = fields.with_values(
        {"hidden_act": _NOMIC_ACTIVATIONS.get(fields.text("hidden_act"), fields.text("hidden_act"))}
    )
    bias = fields.boolean("qkv_proj_bias", False)
    period = fields.integer("moe_every_n_layers", 0, minimum=0)
    if not period:
        fields.require("num_experts", 0)
    spec = _post_normed(
        fields,
        fields.positive("rotary_emb_base", 1000.0),
        has_gate=not period,
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=fields.boolean("mlp_fc1_bias", False),
        tensor_names=_NOMIC_MIXTURE_NAMES if period else _NOMIC_NAMES,
    )
    if not period:
        return spec
    fields.require_all(expert_choice_router=False, num_shared_experts=0)
    count = fields.integer("num_experts")
    experts = ExpertsSpec(
        count,
        fields.integer("moe_top_k", 1, maximum=count),
        fields.integer("intermediate_size"),
        renormalizes=fields.boolean("moe_normalize_expert_weights", False),
        # GGUF files lack it.
        has_sum_bias=fields.boolean("has_sum_bias", True),
    )
    return with_experts(spec, experts, lambda i: i % period == 1)


def _gte(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        rms_norm_eps=1e-12, hidden_act="gelu", type_vocab_size=1, max_position_embeddings=8192
    )
    fields.require_all(
        position_embedding_type="rope", layer_norm_type="layer_norm", logn_attention_scale=False
    )
    return _post_normed(fields, 160_000.0, has_gate=True, mlp_bias=False, mlp_output_bias=True)


def _jina3(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        rms_norm_eps=1e-5, hidden_act="gelu", type_vocab_size=1, max_position_embeddings=8194
    )
    return _post_normed(fields, 20_000.0, tensor_names=_JINA_NAMES)


def _first_colbert(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the encoder of a ColBERT in its first layout: BERT, XLM-RoBERTa, or Jina's with rotations."""
    if fields.text("model_type", "bert") != "xlm-roberta":
        return bert(fields)
    if fields.get("position_embedding_type") != "rotary":
        return roberta(fields)
    theta = fields.positive("rotary_emb_base", 10_000.0)
    return _jina3(
        fields.with_values({"position_embedding_type": None}).with_defaults(rope_theta=theta)
    )


def _roformer(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a RoFormer, a BERT whose embeddings may have another size (arXiv 2104.09864)."""
    fields.require_all(is_decoder=False, rotary_value=False)
    fields = fields.with_defaults(
        rms_norm_eps=1e-12, hidden_act="gelu", type_vocab_size=2, max_position_embeddings=1536
    )
    hidden_size = fields.integer("hidden_size")
    size = fields.integer("embedding_size", hidden_size)
    return _post_normed(
        fields,
        10_000.0,
        rope_order="interleaved",
        embedding_size=None if size == hidden_size else size,
        has_head=False,
        tensor_names=_ROFORMER_NAMES,
    )


def _neobert(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a NeoBERT (arXiv 2502.19587), whose MLPs have two thirds of the size in its config."""
    fields = fields.with_values({"hidden_act": "silu"}).with_defaults(
        rms_norm_eps=1e-6, max_position_embeddings=4096
    )
    # GGUF files have the actual size.
    if fields.boolean("divides_intermediate_size", True):
        size = 2 * fields.integer("intermediate_size") // 3
        fields = fields.with_values({"intermediate_size": -(-size // 8) * 8})
    return llama(
        fields,
        is_causal=False,
        norms=NormNames("attention_norm", None, "ffn_norm", None),
        has_grouped_qkv=True,
        rope_order="interleaved",
        tie_word_embeddings=True,
        tensor_names=_NEOBERT_NAMES,
    )


def _eurobert(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=8192)
    # The masked-language-model head is not used.
    return llama(fields, is_causal=False, tie_word_embeddings=True)


def _ultrabert(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an UltraBERT, a Llama whose windows extend before and after a token."""
    windows, bases = (fields.get(name) for name in ("attention_windows", "rope_theta"))
    if isinstance(windows, list):
        # Configs of the time before transformers had the model.
        kinds = ["sliding_attention" if each else "full_attention" for each in windows]
        fields = fields.with_values({"layer_types": kinds})
        fields = fields.with_defaults(sliding_window=next(filter(None, windows), None))
        if isinstance(bases, list):
            ropes = {
                kind: {"rope_type": "default", "rope_theta": base}
                for kind, base in zip(kinds, bases, strict=False)
            }
            fields = fields.with_values({"rope_parameters": ropes, "rope_theta": None})
    size = head_dim(fields)
    local, full = (
        read_rope_of_layer_type(fields, f"{kind}_attention", size, theta=theta)
        for kind, theta in (("sliding", 10_000.0), ("full", 2_560_000.0))
    )
    # The window includes the token itself.
    window = fields.integer("sliding_window", 128) + 1
    return llama(
        fields,
        is_causal=False,
        tie_word_embeddings=True,
        layers=windowed_layers(
            fields.with_values({"sliding_window": window}), lambda i: (i + 1) % 3 > 0, local, full
        ),
        tensor_names=((r"^(head|projection_head|classifier)\..*", ""),),
    )


def _ultrabert_classifier(fields: ConfigFields) -> ModelSpec:
    return with_score_head(_ultrabert(fields), fields, output=r"^classifier\.", output_bias=True)


def _eurobert_classifier(fields: ConfigFields) -> ModelSpec:
    return with_score_head(
        _eurobert(fields),
        fields,
        dense=r"^dense\.",
        activation="gelu",
        output=r"^classifier\.",
        output_bias=True,
        reduction="mean" if fields.text("classifier_pooling", LATE) == LATE else None,
    )


FAMILIES = (
    Family("ModernBertModel", "modernbert", _modernbert),
    Family("ModernBertForMaskedLM", "modernbert", _modernbert),
    Family("ModernBertForSequenceClassification", "modernbert", _modernbert_classifier),
    Family("ModernBertForTokenClassification", "modernbert", _modernbert_classifier),
    Family("ModernBertSpladeSparseEmbeddingModel", "modernbert", _modernbert_splade),
    Family("ModernBertDecoderForCausalLM", "modernbert-decoder", _modernbert_decoder),
    Family(
        "ModernBertDecoderForSequenceClassification",
        "modernbert-decoder",
        _modernbert_decoder_classifier,
    ),
    *encoder_families("NomicBert", "nomic_bert", _nomic, AFTER_POOLER),
    *encoder_families("New", "new", _gte, AFTER_POOLER),
    *encoder_families("Gte", "gte", _gte, AFTER_POOLER),
    Family("HF_ColBERT", "bert", _first_colbert),
    *encoder_families("JinaEmbeddingsV3", "jina_embeddings_v3", _jina3, WITH_OWN_DENSE),
    *encoder_families("NeoBERT", "neobert", _neobert, HeadNames(r"^dense\.", r"^classifier\.")),
    *encoder_families("RoFormer", "roformer", _roformer, WITH_HIDDEN_ACT_DENSE),
    Family("UltrabertModel", "ultrabert", _ultrabert),
    Family("UltrabertForMaskedLM", "ultrabert", _ultrabert),
    Family("UltrabertForSequenceClassification", "ultrabert", _ultrabert_classifier),
    Family("EuroBertModel", "eurobert", _eurobert),
    Family("EuroBertForMaskedLM", "eurobert", _eurobert),
    Family("EuroBertForSequenceClassification", "eurobert", _eurobert_classifier),
)
