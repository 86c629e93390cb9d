"""Families of bidirectional text encoders with learned positions, such as BERT."""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.checkpoint.pooling.sparse import BGE_M3
from ....layers.spec import ModelSpec
from ....layers.specs.bottleneck import BottleneckSpec
from ....layers.specs.norm_names import NormNames
from ..common import Family, base_spec, uniform_layers
from ..gpt import alibi_slopes
from .heads import (
    AFTER_POOLER,
    WITH_HIDDEN_ACT_DENSE,
    WITH_OWN_DENSE,
    WITH_OWN_GELU_DENSE,
    HeadNames,
    encoder_families,
    with_splade_head,
)

BERT_NAMES = (
    (r"^(.*\.)?(pooler|cls|lm_head|classifier|qa_outputs)\..*", ""),
    # The last layer of ColBERT reads what the model computes for each token.
    (r"^linear\..*", ""),
    (r"\.gamma$", ".weight"),
    (r"\.beta$", ".bias"),
    (r"embeddings\.position_ids$", ""),
    (r"embeddings\.word_embeddings\.", "embed_tokens."),
    (r"embeddings\.position_embeddings\.", "embed_positions."),
    (r"embeddings\.token_type_embeddings\.", "embed_token_types."),
    (r"embeddings\.LayerNorm\.", "embed_norm."),
    (r"encoder\.layer\.", "layers."),
    (r"\.attention\.self\.query\.", ".self_attn.q_proj."),
    (r"\.attention\.self\.key\.", ".self_attn.k_proj."),
    (r"\.attention\.self\.value\.", ".self_attn.v_proj."),
    (r"\.attention\.output\.dense\.", ".self_attn.o_proj."),
    (r"\.attention\.output\.LayerNorm\.", ".attention_norm."),
    (r"\.intermediate\.dense\.", ".mlp.up_proj."),
    (r"\.output\.dense\.", ".mlp.down_proj."),
    (r"\.output\.LayerNorm\.", ".mlp_norm."),
)
_ELECTRA_NAMES = (
    (r"^(generator|discriminator)_(predictions|lm_head)\..*", ""),
    (r"embeddings_project\.", "embed_projection."),
    *BERT_NAMES,
)
_MOBILEBERT_FIELDS: Final[dict[str, Any]] = {
    "classifier_activation": True,
    "key_query_shared_bottleneck": True,
    "normalization_type": "no_norm",
    "trigram_input": True,
    "use_bottleneck": True,
    "use_bottleneck_attention": False,
}
"""The fields of a MobileBERT that all published ones have in common."""
_MOBILEBERT_NAMES = (
    (r"embeddings\.embedding_transformation\.", "embed_projection."),
    (r"\.bottleneck\.input\.", ".input_bottleneck."),
    (r"\.bottleneck\.attention\.", ".key_bottleneck."),
    (r"\.output\.bottleneck\.", ".output_bottleneck."),
    (r"_bottleneck\.LayerNorm\.", "_bottleneck.norm."),
    (r"(\.ffn\.\d+)\.intermediate\.dense\.", r"\1.up_proj."),
    (r"(\.ffn\.\d+)\.output\.dense\.", r"\1.down_proj."),
    (r"(\.ffn\.\d+)\.output\.LayerNorm\.", r"\1.norm."),
    *BERT_NAMES,
)
_REMBERT_NAMES = (
    (r"encoder\.embedding_hidden_mapping_in\.", "embed_projection."),
    *BERT_NAMES,
)
_ALBERT_NAMES = (
    (r"^(predictions|sop_classifier)\..*", ""),
    (r"encoder\.embedding_hidden_mapping_in\.", "embed_projection."),
    (r"\.attention\.(query|key|value)\.", r".attention.self.\1."),
    (r"\.attention\.dense\.", ".self_attn.o_proj."),
    (r"\.attention\.LayerNorm\.", ".attention_norm."),
    (r"\.ffn\.", ".mlp.up_proj."),
    (r"\.ffn_output\.", ".mlp.down_proj."),
    (r"\.full_layer_layer_norm\.", ".mlp_norm."),
)
_JINA2_NAMES = (
    (r"\.mlp\.gated_layers\.", ".mlp.gate_up_proj."),
    (r"\.mlp\.wo\.", ".mlp.down_proj."),
    (r"\.mlp\.layernorm\.", ".mlp_norm."),
    *BERT_NAMES,
)
_JINA2_CODE_NAMES = (
    (r"\.mlp\.up_gated_layer\.", ".mlp.up_gate_proj."),
    (r"\.mlp\.down_layer\.", ".mlp.down_proj."),
    (r"\.attention\.self\.layer_norm_([qk])\.", r".self_attn.\1_norm."),
    (r"\.attention\.output\.LayerNorm\.", ".attention_sum_norm."),
    (r"\.layer_norm_1\.", ".attention_norm."),
    (r"\.layer_norm_2\.", ".mlp_norm."),
    *BERT_NAMES,
)
_IBERT_NAMES = (
    # The numbers of quantized activations and weights.
    (r".*(\.x_min|\.x_max|\.shift|_integer|_scaling_factor)$", ""),
    *BERT_NAMES,
)
_LUKE_NAMES = (
    (r"^(.*\.)?entity_(embeddings|predictions)\..*", ""),
    (r".*\.(w2e|e2w|e2e)_query\..*", ""),
    *BERT_NAMES,
)
_DPR_NAMES = (
    (r"^(question|ctx)_encoder\.bert_model\.", ""),
    *BERT_NAMES,
)
_MPNET_NAMES = (
    (r"encoder\.relative_attention_bias\.", "distance_biases."),
    (r"\.attention\.attn\.([qkvo])\.", r".self_attn.\1_proj."),
    (r"\.attention\.LayerNorm\.", ".attention_norm."),
    *BERT_NAMES,
)


_DISTILBERT_NAMES = (
    (
        r"^(.*\.)?(vocab_(transform|layer_norm|projector)|pre_classifier|classifier|qa_outputs)\..*",
        "",
    ),
    (r"embeddings\.word_embeddings\.", "embed_tokens."),
    (r"embeddings\.position_embeddings\.", "embed_positions."),
    (r"embeddings\.LayerNorm\.", "embed_norm."),
    (r"transformer\.layer\.", "layers."),
    (r"\.attention\.([qkv])_lin\.", r".self_attn.\1_proj."),
    (r"\.attention\.out_lin\.", ".self_attn.o_proj."),
    (r"\.sa_layer_norm\.", ".attention_norm."),
    (r"\.ffn\.lin1\.", ".mlp.up_proj."),
    (r"\.ffn\.lin2\.", ".mlp.down_proj."),
    (r"\.output_layer_norm\.", ".mlp_norm."),
)


_DISTILBERT_HEAD: Final = HeadNames(r"^pre_classifier\.", r"^classifier\.", "relu")


POST_NORMED: Final[dict[str, Any]] = {
    "is_causal": False,
    "norms": NormNames(None, "attention_norm", None, "mlp_norm"),
    "norms_stream": True,
    "norm_kind": "layer",
    "norm_bias": True,
    "has_final_norm": False,
    "has_embedding_norm": True,
    "has_gate": False,
    "qkv_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    # The masked-language-model head is not used.
    "tie_word_embeddings": True,
}
"""The fields in which BERT's spec differs from Llama's, except for the names of tensors."""


def _encoder_spec(fields: ConfigFields, **differences: Any) -> ModelSpec:
    """Return the spec of a BERT model, changed by `differences`."""
    if fields.boolean("is_decoder", False):
        raise fields.wrong("is_decoder", "false", True)
    kind = fields.text("position_embedding_type", "absolute")
    if kind != "absolute":
        raise fields.wrong("position_embedding_type", "'absolute'", kind)
    bert = POST_NORMED | {"tensor_names": BERT_NAMES}
    return base_spec(fields, uniform_layers(fields, None), **bert | differences)


def bert(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a BERT (arXiv 1810.04805)."""
    fields = fields.with_defaults(
        hidden_act="gelu", rms_norm_eps=1e-12, max_position_embeddings=512
    )
    return _encoder_spec(
        fields,
        num_positions=fields.integer("max_position_embeddings"),
        num_token_types=fields.integer("type_vocab_size", 2),
    )


def _electra(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an ELECTRA, a BERT whose embeddings may have another size (arXiv 2003.10555)."""
    spec, size = bert(fields), fields.integer("embedding_size", 128)
    return replace(
        spec,
        embedding_size=None if size == spec.hidden_size else size,
        has_head=False,
        tensor_names=_ELECTRA_NAMES,
    )


def _albert(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an ALBERT, whose layers have the weights of a few groups (arXiv 1909.11942)."""
    fields.require("inner_group_num", 1)
    fields = fields.with_defaults(hidden_act="gelu_new")
    count = fields.layer_count("num_hidden_layers")
    num_groups = fields.integer("num_hidden_groups", 1, maximum=count)
    groups = [i * num_groups // count for i in range(count)]
    first_layers = [groups.index(group) for group in range(num_groups)]
    spec = bert(fields)
    layers = tuple(
        replace(layer, weights=None if first_layers[group] == i else first_layers[group])
        for i, (layer, group) in enumerate(zip(spec.layers, groups, strict=True))
    )
    prefixes = tuple(
        (rf"encoder\.albert_layer_groups\.{group}\.albert_layers\.0\.", f"layers.{layer}.")
        for group, layer in enumerate(first_layers)
    )
    return replace(
        spec,
        embedding_size=fields.integer("embedding_size", 128),
        has_head=False,
        layers=layers,
        tensor_names=(*_ALBERT_NAMES, *prefixes, *BERT_NAMES),
    )


def _ernie(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an ERNIE, a BERT that may add the embedding of a task, always the first one."""
    has_tasks = fields.boolean("use_task_id", False)
    return replace(
        bert(fields),
        num_tasks=fields.integer("task_type_vocab_size", 3) if has_tasks else 0,
        tensor_names=((r"embeddings\.task_type_embeddings\.", "embed_tasks."), *BERT_NAMES),
    )


def _rembert(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a RemBERT, a BERT whose embeddings have another size (arXiv 2010.12821)."""
    return replace(
        bert(fields),
        embedding_size=fields.integer("input_embedding_size", 256),
        has_head=False,
        tensor_names=_REMBERT_NAMES,
    )


def _convbert(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a ConvBERT (arXiv 2008.02496), half of whose heads are convolutions."""
    fields.require("num_groups", 1)
    num_taps = fields.integer("conv_kernel_size", 9)
    if num_taps % 2 == 0:
        raise fields.wrong("conv_kernel_size", "an odd number", num_taps)
    heads = max(1, fields.integer("num_attention_heads") // fields.integer("head_ratio", 2))
    size = fields.integer("hidden_size") // heads // 2
    spec = _electra(
        fields.with_values({"num_attention_heads": heads, "head_dim": size}).with_defaults(
            embedding_size=768
        )
    )
    names = (
        r"\.attention\.self\.(key_conv_attn|conv_kernel|conv_out)_layer\.",
        r".self_attn.\1_layer.",
    )
    return replace(spec, num_span_taps=num_taps, tensor_names=(names, *spec.tensor_names))


def _mobilebert(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a MobileBERT (arXiv 2004.02984), whose layers have bottlenecks."""
    fields.require_all(**_MOBILEBERT_FIELDS)
    size = fields.integer("intra_bottleneck_size", 128)
    fields = fields.with_defaults(hidden_act="relu", intermediate_size=512)
    heads = fields.integer("num_attention_heads")
    return replace(
        bert(fields.with_values({"head_dim": size // heads})),
        embedding_size=fields.integer("embedding_size", 128),
        joins_neighbors=True,
        norm_kind="affine",
        bottleneck=BottleneckSpec(size, fields.integer("num_feedforward_networks", 4)),
        has_head=False,
        tensor_names=_MOBILEBERT_NAMES,
    )


def positions_after_padding(fields: ConfigFields) -> tuple[ConfigFields, int]:
    """Return the fields with the number of usable positions, and the row of the first one.

    It follows the row of the padding token.
    """
    offset = fields.integer("pad_token_id", 1, minimum=0) + 1
    count = fields.integer("max_position_embeddings", 512) - offset
    return fields.with_values({"max_position_embeddings": count}), offset


def roberta(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a RoBERTa (arXiv 1907.11692), whose positions begin after that of padding."""
    fields = fields.with_defaults(hidden_act="gelu", rms_norm_eps=1e-12, type_vocab_size=2)
    fields, offset = positions_after_padding(fields)
    return _encoder_spec(
        fields,
        num_positions=fields.integer("max_position_embeddings"),
        position_offset=offset,
        num_token_types=fields.integer("type_vocab_size"),
    )


def bert_generation(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an encoder of arXiv 1907.12461, a BERT without token types."""
    fields = fields.with_defaults(max_position_embeddings=512)
    return replace(bert(fields), num_token_types=0)


def _dpr(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an encoder of DPR (arXiv 2004.04906), a BERT whose first token is the embedding."""
    fields.require("projection_dim", 0)
    return replace(bert(fields), tensor_names=_DPR_NAMES)


def _ibert(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an I-BERT (arXiv 2101.01321), which is a RoBERTa unless it computes with integers."""
    fields.require("quant_mode", False)
    return replace(roberta(fields), tensor_names=_IBERT_NAMES)


def _luke(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a LUKE (arXiv 2010.01057) without entities, which is a RoBERTa."""
    return replace(roberta(fields), tensor_names=_LUKE_NAMES)


def _distilbert(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_values({"rms_norm_eps": 1e-12}).with_defaults(
        hidden_act="gelu", max_position_embeddings=512
    )
    return _encoder_spec(
        fields,
        num_positions=fields.integer("max_position_embeddings"),
        tensor_names=_DISTILBERT_NAMES,
    )


def _mpnet(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        hidden_act="gelu", rms_norm_eps=1e-12, max_position_embeddings=512, vocab_size=30527
    )
    # Positions start at the row after the padding token's, which is always 1.
    fields = fields.with_values(
        {"max_position_embeddings": fields.integer("max_position_embeddings") - 2}
    )
    return _encoder_spec(
        fields,
        num_positions=fields.integer("max_position_embeddings"),
        position_offset=2,
        num_distance_buckets=32,
        tensor_names=_MPNET_NAMES,
    )


def _jina2(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Jina v2, a BERT with ALiBi (in both directions) and gates (arXiv 2310.19923)."""
    fields.require_all(position_embedding_type="alibi", feed_forward_type="geglu")
    fields = fields.with_values({"position_embedding_type": None}).with_defaults(
        hidden_act="gelu", rms_norm_eps=1e-12, max_position_embeddings=8192
    )
    spec = _encoder_spec(
        fields,
        alibi_slopes=alibi_slopes(fields),
        num_token_types=fields.integer("type_vocab_size", 2),
        has_gate=True,
        mlp_bias=False,
        mlp_output_bias=True,
        tensor_names=_JINA2_NAMES,
    )
    # Only the name of the published code says that a Jina v2 is for code, whose layers have more norms.
    if "qk-post-norm" not in f"{fields.get('auto_map')} {fields.get('_name_or_path')}":
        return spec
    return replace(
        spec,
        norms=replace(spec.norms, attention_sum="attention_sum_norm"),
        qk_norm="full",
        qk_norm_bias=True,
        tensor_names=_JINA2_CODE_NAMES,
    )


def _bert_splade(fields: ConfigFields) -> ModelSpec:
    head, spec = r"^cls\.predictions\.", bert(fields)
    return with_splade_head(
        spec,
        fields,
        activation=spec.activation,
        dense=rf"{head}transform\.dense\.",
        norm=rf"{head}transform\.LayerNorm\.",
        bias=rf"{head}(?=bias$)",
    )


def _roberta_splade(fields: ConfigFields) -> ModelSpec:
    return with_splade_head(
        roberta(fields),
        fields,
        dense=r"^lm_head\.dense\.",
        norm=r"^lm_head\.layer_norm\.",
        bias=r"^lm_head\.(?=bias$)",
    )


def _distilbert_splade(fields: ConfigFields) -> ModelSpec:
    spec = _distilbert(fields)
    return with_splade_head(
        spec,
        fields,
        activation=spec.activation,
        dense=r"^vocab_transform\.",
        norm=r"^vocab_layer_norm\.",
        bias=r"^vocab_projector\.(?=bias$)",
    )


FAMILIES = (
    *encoder_families(
        "Albert", "albert", _albert, HeadNames(r"^(.*\.)?pooler\.", r"^classifier\.")
    ),
    *encoder_families("Bert", "bert", bert, AFTER_POOLER),
    Family("BertSpladeSparseEmbeddingModel", "bert", _bert_splade),
    *encoder_families("DistilBert", "distilbert", _distilbert, _DISTILBERT_HEAD),
    Family("DistilBertSpladeSparseEmbeddingModel", "distilbert", _distilbert_splade),
    Family("BertGenerationEncoder", "bert-generation", bert_generation),
    Family("DPRContextEncoder", "dpr", _dpr),
    Family("DPRQuestionEncoder", "dpr", _dpr),
    Family("SplinterModel", "splinter", bert),
    *encoder_families("Electra", "electra", _electra, WITH_OWN_GELU_DENSE),
    *encoder_families("ConvBert", "convbert", _convbert, WITH_HIDDEN_ACT_DENSE),
    *encoder_families("MobileBert", "mobilebert", _mobilebert, AFTER_POOLER),
    *encoder_families("Ernie", "ernie", _ernie, AFTER_POOLER),
    *encoder_families("IBert", "ibert", _ibert, WITH_OWN_DENSE),
    *encoder_families("Luke", "luke", _luke, AFTER_POOLER),
    *encoder_families("RemBert", "rembert", _rembert, AFTER_POOLER),
    *encoder_families("Roberta", "roberta", roberta, WITH_OWN_DENSE),
    Family("RobertaSpladeSparseEmbeddingModel", "roberta", _roberta_splade),
    *encoder_families("XLMRoberta", "xlm-roberta", roberta, WITH_OWN_DENSE),
    Family(BGE_M3, "xlm-roberta", roberta),
    Family("XLMRobertaSpladeSparseEmbeddingModel", "xlm-roberta", _roberta_splade),
    *encoder_families("JinaBert", "jina_bert", _jina2, AFTER_POOLER),
    *encoder_families("MPNet", "mpnet", _mpnet, WITH_OWN_DENSE),
)
